"""SIGKILL to the server, and to a trainer rank, while a lane sends buckets: all ends, and is named."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from weightlane.testing.parity_run import parity_ranks, run_parity
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
WITHIN_SECONDS = 30.0
SLOW = {"bucket-bytes": 1 << 16, "bucket-seconds": 0.5}


@pytest.mark.requirement("R64")
def test_a_trainer_rank_then_the_server_killed_in_mid_sync(
    start_closed_server: Callable[[Path], AbstractContextManager[RunningServer]], tiny_folder: Path
) -> None:
    # A server that nothing of ours enters: lanes into it are planned from its version's snapshot.
    with start_closed_server(tiny_folder) as server:
        # A rank that holds a third of the tensors dies; the server lives on and takes the next lane's sync.
        with parity_ranks(
            model=tiny_folder,
            engine="sglang",
            url=server.url,
            ranks=3,
            options={**SLOW, "placement": "partitioned"},
        ) as group:
            group.wait_for_output(0, "MOVED A BUCKET", 200)
            process = group.process_id(1)
            group.kill(1)
            outcomes = group.wait(100)
        assert "coverage assumed: from the snapshot of sglang 0.5.18 Qwen3ForCausalLM" in outcomes[0].output
        assert "; the server was started without" in outcomes[0].output
        steps = steps_named(outcomes, "sync 1")
        assert {step.rank for step in steps} == {0, 2}
        for step in steps:
            assert step.outcome == "error"
            assert f"ank 1 (process {process}" in step.text
            assert step.seconds < WITHIN_SECONDS
        run_parity(
            model=tiny_folder, engine="sglang", url=server.url, ranks=1, syncs=1, seconds=200, options={}
        )

        with parity_ranks(model=tiny_folder, engine="sglang", url=server.url, ranks=2, options=SLOW) as group:
            group.wait_for_output(0, "MOVED A BUCKET", 200)
            os.killpg(server.process_id, signal.SIGKILL)
            outcomes = group.wait(100)
        steps = steps_named(outcomes, "sync 1")
        assert {step.rank for step in steps} == {0, 1}
        for step in steps:
            assert step.outcome == "error"
            assert step.type == "EngineDeadError"
            assert server.url in step.text
            assert step.seconds < WITHIN_SECONDS
