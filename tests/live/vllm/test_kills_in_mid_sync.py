"""SIGKILL to a vLLM worker, and to a trainer rank, while a lane moves buckets: all ends, and is named."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from weightlane.front.client import FrontEndpoint
from weightlane.testing.parity_run import parity_ranks, run_parity
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

BACKEND = "weightlane-vllm/vllm@lora-load-weights"  # two eras share the plain name
WITHIN_SECONDS = 30.0
SLOW = {"bucket-bytes": 1 << 16, "bucket-seconds": 0.5}


@pytest.mark.requirement("R64")
def test_a_trainer_rank_then_a_worker_killed_in_mid_sync(
    start_front: Callable[[Path, int], AbstractContextManager[FrontProcess]], tiny_folder: Path
) -> None:
    with start_front(tiny_folder, 2) as front:
        # The rank that feeds worker 1 dies: the other ranks and both workers end, and the engine lives on.
        with parity_ranks(
            model=tiny_folder, engine="vllm", url=front.address, ranks=3, options=SLOW
        ) as group:
            group.wait_for_output(1, "MOVED A BUCKET", 200)
            process = group.process_id(1)
            group.kill(1)
            outcomes = group.wait(100)
        steps = steps_named(outcomes, "sync 1")
        assert {step.rank for step in steps} == {0, 2}
        for step in steps:
            assert step.outcome == "error"
            assert str(process) in step.text
            assert step.seconds < WITHIN_SECONDS
        run_parity(
            model=tiny_folder, engine="vllm", url=front.address, ranks=1, syncs=1, seconds=200, options={}
        )

        # A worker dies: no rank is left waiting for it.
        victim = FrontEndpoint(front.address, 60.0).describe_workers(BACKEND)[1].process_id
        with parity_ranks(
            model=tiny_folder, engine="vllm", url=front.address, ranks=2, options=SLOW
        ) as group:
            group.wait_for_output(0, "MOVED A BUCKET", 200)
            os.kill(victim, signal.SIGKILL)
            outcomes = group.wait(100)
        steps = steps_named(outcomes, "sync 1")
        assert {step.rank for step in steps} == {0, 1}
        for step in steps:
            assert step.outcome == "error"
            assert step.type == "EngineDeadError"
            assert front.address in step.text
            assert str(victim) in step.text
            assert step.seconds < WITHIN_SECONDS
