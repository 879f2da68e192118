"""The controller's side: one folder, written once and loaded by every replica."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from disk_lane import BOUNDS, lane_plan
from fake_engine import WEIGHTS, FakeWorkerEngine, agent_of_fake
from msgspec.structs import replace

from weightlane.bounds import Bounds
from weightlane.errors import EngineError, SyncError
from weightlane.messages import WireTensor
from weightlane.plan_problems import folder_problems
from weightlane.receiver import NameEntry
from weightlane.replica_session import ReplicaSession
from weightlane.transports.choice import controller_sink
from weightlane.transports.disk import DiskSink
from weightlane.transports.disk_folder import LaneFolder
from weightlane.transports.disk_receivers import FolderReceivers
from weightlane.types import TransportName
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeFront:
    """Carries messages to one agent of this process."""

    address = "here"

    def __init__(self, engine: FakeWorkerEngine) -> None:
        self._agent = agent_of_fake(engine)
        self.threads: set[str] = set()

    def call_workers(self, message: bytes, seconds: float) -> list[bytes]:
        self.threads.add(threading.current_thread().name)
        return [self._agent.handle(message)]

    def close(self) -> None:
        return None


class FakeLane:
    """Two replicas, of which the second has an incarnation of its own, and their one folder."""

    def __init__(self, parent: str) -> None:
        plan = lane_plan()
        first = plan.replicas[0]
        second = replace(first, replica=1, incarnations={0: "other"})
        self.plan = replace(plan, replicas=(first, second))
        self.engines = (
            FakeWorkerEngine(prefix="model."),
            FakeWorkerEngine(incarnation="other", prefix="model."),
        )
        self.fronts: list[Any] = [FakeFront(engine) for engine in self.engines]
        self.sessions = [
            ReplicaSession(self.plan, number, front, Bounds()) for number, front in enumerate(self.fronts)
        ]
        self.folder = LaneFolder(plan.lane, parent)
        self.sink = DiskSink(self.plan, self.folder, FolderReceivers(self.plan, tuple(self.sessions)))
        self.failures: list[BaseException] = []
        for session in self.sessions:
            session.attach((), self.folder.path)

    def begin(self, sync: int) -> None:
        for session in self.sessions:
            session.begin(sync, sync + 10, self.failures.append)

    def move(self, sync: int) -> str:
        self.sink.begin(sync, sync + 10, BOUNDS)
        values = list(WEIGHTS.values())
        for layout in self.plan.buckets:
            self.sink.put(layout, [(entry.tensor, values[entry.tensor]) for entry in layout.entries])
        return self.sink.finish()


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[FakeLane]:
    with ExitStack() as stack:
        made = FakeLane(str(tmp_path))
        stack.callback(made.sink.close)
        yield made


def test_every_replica_loads_what_was_written_once_each_in_a_thread(lane: FakeLane) -> None:
    lane.begin(1)
    digest = lane.move(1)
    reports = [session.reports(1, nothing_to_check) for session in lane.sessions]
    assert [[report.digest for report in each] for each in reports] == [[digest], [digest]]
    for engine, front in zip(lane.engines, lane.fronts, strict=True):
        assert all(torch.equal(engine.held[name], WEIGHTS[name]) for name in WEIGHTS)
        assert "weightlane-receive" in front.threads
    for session in lane.sessions:
        session.publish(1, 11)
    assert lane.failures == []
    for number, front in enumerate(lane.fronts):
        assert controller_sink(lane.plan, number, front) is None


def test_a_worker_made_anew_is_refused_before_anything_is_written(lane: FakeLane) -> None:
    lane.engines[1].incarnation = "third"
    with pytest.raises(SyncError, match="is incarnation third, the plan was made for other"):
        lane.begin(1)
    assert list(Path(lane.folder.path).iterdir()) == []
    assert lane.engines[0].writes == []
    assert lane.engines[1].writes == []


def test_a_replica_that_fails_to_load_is_told_at_once_and_by_its_report(lane: FakeLane) -> None:
    lane.engines[1].raises["load_weights"] = KeyError("lm_head.weight")
    lane.begin(1)
    lane.move(1)
    assert lane.sessions[0].reports(1, nothing_to_check)[0].loaded == 3
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        lane.sessions[1].reports(1, nothing_to_check)
    assert len(lane.failures) == 1


def test_over_disk_each_bucket_is_waited_for_twice(lane: FakeLane) -> None:
    assert lane.plan.bucket_waits == 6
    by_value = replace(lane.plan.replicas[0], transport=TransportName.INLINE)
    assert replace(lane.plan, replicas=(by_value,)).bucket_waits == 3


def test_the_plan_names_the_folder(lane: FakeLane) -> None:
    assert "folder: /shared/versions" in str(replace(lane.plan, folder="/shared/versions"))
    by_value = replace(lane.plan.replicas[0], transport=TransportName.INLINE)
    assert "folder" not in str(replace(lane.plan, replicas=(by_value,)))


def test_what_cannot_be_stored_is_a_problem_by_canonical_name() -> None:
    tensors = (WireTensor("wire", (1,), "complex128"),)
    entries = (
        NameEntry("dropped", "x", "complex128", dropped="tied"),
        NameEntry("model.x", "wire", "complex128"),
    )
    (problem,) = folder_problems(TransportName.DISK, "", entries, tensors)
    assert (problem.kind, problem.subject) == ("dtype", "model.x")
    assert folder_problems(TransportName.INLINE, "", entries, tensors) == []
