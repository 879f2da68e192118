"""A replica that is stopped after the question before a sync: while buckets move, and at commit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import local_engines
import pytest
from local_engines import change, weights_of
from stopped_processes import Hang

import weightlane as wl
from weightlane.errors import WeightlaneError
from weightlane.replica_session import ReplicaSession
from weightlane.sync_run import SyncRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import EngineProcess
    from torch import Tensor

    from weightlane.lane import Lane

BOUNDS = replace(local_engines.BOUNDS, start=2.0, bucket=2.0, finish=2.0, lost_after=2.0)
SECONDS = 15.0
"""One wait takes 2 s and its overrun, ending the sync about as long; the rest is a busy machine's."""


@pytest.fixture(autouse=True)
def short_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.front.endpoint.ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("weightlane.replica_session._CLEANUP_SECONDS", 0.5)
    monkeypatch.setattr("weightlane.sync_run._CANCEL_SECONDS", 0.5)


@pytest.fixture(scope="module")
def process(start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    return start_engine()


def lane_to(process: EngineProcess, weights: dict[str, Tensor], transport: str) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("reference", url=process.address)],
        bounds=BOUNDS,
        bucket_bytes=64 << 10,
        transport=transport,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("transport", "owner", "step"), [("inline", SyncRun, "_move"), ("shm", ReplicaSession, "publish")]
)
def test_every_wait_for_it_ends_and_the_next_sync_heals(
    model_folder: Path,
    process: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    owner: type,
    step: str,
) -> None:
    hang = Hang(process.process_id)
    inner = getattr(owner, step)

    def hung(self: Any, *arguments: Any) -> Any:
        hang.begin()
        return inner(self, *arguments)

    weights = weights_of(model_folder)
    with lane_to(process, weights, transport) as lane:
        lane.sync(version=1)
        change(weights, seed=1)
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, hung)
            started = time.monotonic()
            try:
                with pytest.raises(WeightlaneError) as caught:
                    lane.sync(version=2)
                seconds = time.monotonic() - started
            finally:
                hang.end()
        assert seconds < SECONDS
        assert process.address in str(caught.value)
        assert lane.state.phase == "failed"
        assert lane.published_version == 1
        lane.sync(version=3)
        assert lane.replicas[0].generate(local_engines.PROMPT, max_tokens=1)[0].weight_version == 3
