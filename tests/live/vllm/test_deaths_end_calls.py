"""A killed engine core: the call that runs, and every later one, ends with the cause.

A killed worker is in test_kills_in_mid_sync.py, where a lane is the caller.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import weightlane as wl
from weightlane import messages
from weightlane.errors import EngineDeadError, EngineError
from weightlane.front.client import FrontEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

BACKEND = "weightlane-vllm/vllm@lora-load-weights"  # two eras share the plain name

ENDS_WITHIN = 30.0


def stat_of(pid: int) -> list[str]:
    """State, parent and what follows of a process, as /proc tells them."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def lives(pid: int) -> bool:
    try:
        return stat_of(pid)[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.requirement("R64")
def test_a_killed_engine_core_ends_the_long_call(
    start_front: Callable[[Path, int], AbstractContextManager[FrontProcess]],
    tiny_folder: Path,
    trainer_of: type,
) -> None:
    """The controller waits in a receive whose ring nobody fills: the case that would wait longest."""
    trainer = trainer_of(tiny_folder)
    with start_front(tiny_folder, 2) as front:
        endpoint = FrontEndpoint(front.address, 60.0)
        workers = endpoint.describe_workers(BACKEND)
        target = int(stat_of(workers[-1].process_id)[1])  # the workers' parent
        with wl.connect(
            trainer=wl.trainer("torch", model=trainer.model),
            rollout=[wl.rollout("vllm", url=front.address)],
        ) as lane:
            plan = lane.plan()
            receive = messages.Receive(
                lane=plan.lane,
                plan_digest=plan.digest(),
                sync=1,
                version=1,
                incarnation=plan.replicas[0].incarnations,
                wait_seconds=200.0,
                lost_after_seconds=200.0,
            )
            outcome: list[BaseException] = []

            def call() -> None:
                try:
                    endpoint.call_workers(messages.encode(receive), 250.0)
                except BaseException as error:  # noqa: BLE001 - what it was is asserted below
                    outcome.append(error)

            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            time.sleep(2.0)
            assert thread.is_alive(), "the receive was to wait for its first bucket"
            killed = time.monotonic()
            os.kill(target, signal.SIGKILL)
            thread.join(ENDS_WITHIN)
            took = time.monotonic() - killed
            assert not thread.is_alive()
            (error,) = outcome
            assert isinstance(error, EngineDeadError)
            assert str(target) in str(error), "the cause names the process"
            assert took < ENDS_WITHIN
            with pytest.raises(EngineDeadError, match=str(target)):
                endpoint.facts()
            with pytest.raises(EngineError, match=str(target)):
                endpoint.generate([(1, 2, 3)], max_tokens=2)
    deadline = time.monotonic() + 10.0
    while any(lives(worker.process_id) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [worker.process_id for worker in workers if lives(worker.process_id)]
