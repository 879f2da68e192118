"""A replica that is stopped and does not die: the question before a sync ends, and it is taken back later."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import local_engines
import pytest
from local_engines import PROMPT, FakeMortalEngine, change, held_equal, lane_to, versions_held, weights_of
from stopped_processes import Hang

import weightlane as wl
from weightlane.errors import SyncTimeoutError
from weightlane.replica_session import ReplicaSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import EngineProcess
    from torch import Tensor

    from weightlane.lane import Lane
    from weightlane.messages import Generation
    from weightlane.residency import ReplicaResidency
    from weightlane.types import MissingPolicy

BOUNDS = replace(local_engines.BOUNDS, start=3.0)
OVERRUN_SECONDS = 0.5
SECONDS = 15.0
"""What is waited for is 3 s and its overrun, then 1 s for the cancelling; the rest is a busy machine's."""


@pytest.fixture(autouse=True)
def short_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.front.endpoint.ANSWER_SECONDS", OVERRUN_SECONDS)
    monkeypatch.setattr("weightlane.replica_session._CLEANUP_SECONDS", OVERRUN_SECONDS)
    monkeypatch.setattr("weightlane.sync_run._CANCEL_SECONDS", OVERRUN_SECONDS)


@pytest.fixture(scope="module")
def processes(start_engine: Callable[..., EngineProcess]) -> tuple[EngineProcess, EngineProcess]:
    return start_engine(), start_engine()


@pytest.fixture
def hangs(processes: tuple[EngineProcess, EngineProcess]) -> Iterator[Hang]:
    hang = Hang(processes[1].process_id)
    yield hang
    hang.end()


def lane_between(
    model: Path, processes: tuple[EngineProcess, EngineProcess], policy: MissingPolicy
) -> tuple[Lane, dict[str, Tensor]]:
    weights = weights_of(model)
    lane = wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("reference", url=process.address) for process in processes],
        bounds=BOUNDS,
        bucket_bytes=64 << 10,
        missing_replicas=policy,
    )
    return lane, weights


def said(lane: Lane, number: int) -> Generation:
    return lane.replicas[number].generate(PROMPT, max_tokens=4)[0]


def test_the_sync_fails_by_name_in_time_and_the_other_serves_what_it_had(
    model_folder: Path, processes: tuple[EngineProcess, EngineProcess], hangs: Hang
) -> None:
    lane, weights = lane_between(model_folder, processes, "fail")
    with lane:
        assert {replica.transport.value for replica in lane.plan().replicas} == {"shm"}
        lane.sync(version=1)
        before = said(lane, 0)
        change(weights, seed=1)
        hangs.begin()
        started = time.monotonic()
        with pytest.raises(SyncTimeoutError) as caught:
            lane.sync(version=2)
        assert time.monotonic() - started < SECONDS
        text = str(caught.value)
        assert "Replica 1 of lane" in text
        assert processes[1].address in text
        assert "before sync 2" in text
        assert "touched no receiver" in text
        assert said(lane, 0) == before, "its weights or its version moved"
        first, second = lane.residency(seconds=OVERRUN_SECONDS)
        assert (first.error, first.workers[0].held_version) == (None, 1)
        assert isinstance(second.error, SyncTimeoutError)
        assert "SyncTimeoutError" in lane.state.replicas[1].last_error
        hangs.end()
        assert said(lane, 1) == before
        report = lane.sync(version=3)
        assert (report.missing, report.rejoined) == ((), ()), "it is the one that it was"
        assert said(lane, 1) == said(lane, 0)
        assert said(lane, 1).weight_version == 3
        assert said(lane, 1).logprobs != before.logprobs, "else the comparison above would show nothing"


def test_skip_goes_on_without_it_and_the_next_sync_brings_it_level(
    model_folder: Path,
    processes: tuple[EngineProcess, EngineProcess],
    hangs: Hang,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    residency = ReplicaSession.residency

    def noting(session: ReplicaSession, seconds: float) -> ReplicaResidency:
        asked.append(session.number)
        return residency(session, seconds)

    lane, weights = lane_between(model_folder, processes, "skip")
    with lane:
        lane.sync(version=1)
        change(weights, seed=1)
        hangs.begin()
        monkeypatch.setattr(ReplicaSession, "residency", noting)
        started = time.monotonic()
        report = lane.sync(version=2)
        assert time.monotonic() - started < SECONDS
        ((number, cause),) = [(item.replica, item.cause) for item in report.missing]
        assert number == 1
        assert asked.count(1) == 1, "it is waited for once, not again at commit"
        assert asked.count(0) == 2
        assert "got no answer within 3.5 s" in cause
        assert said(lane, 0).weight_version == 2
        hangs.end()
        assert said(lane, 1).weight_version == 1
        assert said(lane, 1).logprobs != said(lane, 0).logprobs
        report = lane.sync(version=3)
        assert report.missing == ()
        assert [replica.replica for replica in report.replicas] == [0, 1]
        assert said(lane, 1) == said(lane, 0)
        assert said(lane, 1).weight_version == 3
        assert lane.state.replicas[1].missing == ""


class FakeHangingEngine(FakeMortalEngine):
    """Its endpoint does not end a call by itself either."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        assert self.goes_on.wait(60.0), "the test never let it go on"
        return super().call_workers(message, timeout_seconds)


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_an_endpoint_that_never_ends_the_call_keeps_no_sync_waiting(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("weightlane.residency._OVERRUN_SECONDS", OVERRUN_SECONDS)
    monkeypatch.setattr(local_engines, "BOUNDS", replace(local_engines.BOUNDS, start=3.0))
    pair = [FakeHangingEngine(str(model_folder)) for _ in range(2)]
    weights = weights_of(model_folder)
    with lane_to(weights, pair, missing_replicas=policy) as lane:
        lane.sync(version=1)
        change(weights, seed=1)
        pair[1].goes_on.clear()
        if policy == "fail":
            with pytest.raises(SyncTimeoutError, match="did not tell what it holds within 3 s"):
                lane.sync(version=2)
            assert not held_equal(pair[0], weights)
        else:
            (missing,) = lane.sync(version=2).missing
            assert "Its endpoint did not end the call in time either" in missing.cause
        assert versions_held(pair) == [1 if policy == "fail" else 2, 1]
        pair[1].goes_on.set()
        lane.sync(version=3)
        assert versions_held(pair) == [3, 3]
        assert all(held_equal(engine, weights) for engine in pair)
