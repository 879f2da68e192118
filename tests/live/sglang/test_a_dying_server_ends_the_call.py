"""A server that dies in mid-update ends the call soon and by name; its successor is another incarnation."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import server_checks

from weightlane.errors import EngineDeadError
from weightlane.trace.coverage import coverage_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.program import Program
    from weightlane_sglang.endpoint import SglangEndpoint
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

WITHIN_SECONDS = 30


def schedulers(server: RunningServer) -> list[int]:
    """The server's scheduler processes, found in its own process group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                name = (folder / "comm").read_text()
                if os.getpgid(int(folder.name)) == server.process_id and name.startswith("sglang::schedul"):
                    found.append(int(folder.name))
            except (OSError, ProcessLookupError):
                continue
    return found


def send_for_ever(endpoint: SglangEndpoint, program: Program, trainer: Any) -> None:
    while True:
        endpoint.send_bucket(program.move, trainer.tensors(), last=True, version=1)


def seconds_until_told(endpoint: SglangEndpoint, program: Program, trainer: Any, victim: int) -> float:
    """Sends updates, kills `victim` meanwhile, and gives the seconds from there to the error."""
    killed: list[float] = []

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        killed.append(time.monotonic())

    timer = threading.Timer(0.5, kill)
    timer.start()
    with pytest.raises(EngineDeadError, match="/update_weights_from_tensor"):
        send_for_ever(endpoint, program, trainer)
    told = time.monotonic()
    timer.join()
    return told - killed[0]


@pytest.mark.requirement("R64")
def test_a_killed_scheduler_is_told_in_time_and_its_server_was_another_incarnation(
    tiny_server: RunningServer,
    start_server: Any,
    lora_arguments: tuple[str, ...],
    open_server: Callable[[RunningServer], SglangEndpoint],
    program_of: Callable[[SglangEndpoint], Program],
    trainer_of: Callable[[Path], Any],
    tiny_folder: Path,
) -> None:
    """The server itself is killed in test_kills_in_mid_sync.py, by a lane's user."""
    trainer = trainer_of(tiny_folder)
    other = open_server(tiny_server).describe_workers("sglang")[0].incarnation
    with start_server(tiny_folder, 1, arguments=lora_arguments) as server:
        endpoint = open_server(server)
        # Here, since a start with LoRA on costs a minute: its wrapped layers are traced as they are synced.
        (table,) = server_checks.traced(endpoint)
        assert table.key.lora
        assert coverage_problems([table], {}, receiver="the server") == []
        assert server_checks.differences_from_the_oracle(endpoint) == [[]]
        server_checks.assert_undisturbed(endpoint, 10)
        assert endpoint.describe_workers("sglang")[0].incarnation != other
        victim = schedulers(server)[0]
        assert seconds_until_told(endpoint, program_of(endpoint), trainer, victim) < WITHIN_SECONDS
