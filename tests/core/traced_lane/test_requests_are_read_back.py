"""A replica that takes requests only: hashed as it is sent, its endpoint asked before one publishes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec import structs
from packing_engine import FakePackingEngine, weights
from planning_rig import SELECTED, FakeEndpoint, FakeRegistry, exported, opened, request_for

from weightlane.bounds import Bounds
from weightlane.errors import PlanError, ProtocolError, VerificationError
from weightlane.messages import ReadBack
from weightlane.planning import make_plan, map_replicas
from weightlane.program import Program, RequestMove
from weightlane.replica_session import ReplicaSession
from weightlane.trace.live_hashes import live_hashes
from weightlane.transports.choice import controller_sink
from weightlane.transports.sink import SinkBounds
from weightlane.verify import verify_replica, with_read_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.plan import LanePlan
    from weightlane.trace.table import LiveHashes, PlacementTable

MOVE = RequestMove("update", "payload", 2, "{}", "{}")
ELEMENTS = (3 * 8 + 2 * 8 + 4 + 24 + 8,) * 2  # qkv, experts, norm, embedding and its padding, of each half


class FakeQuietEndpoint(FakeEndpoint):
    """A server of two workers that takes requests; traces by a way of its own, and reads nothing back."""

    def trace_workers(self, tensors: Any, timeout_seconds: float) -> tuple[PlacementTable, ...]:
        return tuple(engine.trace(tensors) for engine in self.engines)

    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        for engine in self.engines:
            engine.load_weights(tensors)
            if last:
                engine.finish(version)

    def describe_workers(self, backend: str) -> Any:
        return (structs.replace(self.engines[0].describe(), workers=1),)


class FakeTellingEndpoint(FakeQuietEndpoint):
    """Also tells what its workers hold."""

    asked = 0
    gives: int | None = None

    def read_back(self, tables: Sequence[PlacementTable], timeout_seconds: float) -> tuple[LiveHashes, ...]:
        self.asked += 1
        pairs = zip(tables, self.engines, strict=True)
        found = tuple(live_hashes(table, engine.live_tensors()) for table, engine in pairs)
        return found[: self.gives]


class FakeRequestRegistry(FakeRegistry):
    def call_build_requests(self, selected: Any, context: object) -> Program:
        return Program(MOVE)


class Lane:
    """One replica, planned; syncs as `SyncRun` does, from the first bucket to before the publication."""

    def __init__(self, kind: type[FakeQuietEndpoint] = FakeTellingEndpoint, **fields: Any) -> None:
        self.endpoint: Any = kind([FakePackingEngine(0, 2), FakePackingEngine(1, 2)])
        registry: Any = FakeRequestRegistry()
        request, parts = request_for(**fields), [exported()]
        replica = replace(opened([FakePackingEngine()]), endpoint=self.endpoint, selected=SELECTED)
        (mapped,) = map_replicas(registry, request, parts, [replica])
        self.plan: LanePlan = make_plan(registry, request, parts, [mapped])
        self.session = ReplicaSession(self.plan, 0, self.endpoint, Bounds(), tables=mapped.tables)
        self.sink: Any = controller_sink(self.plan, 0, self.endpoint, self.session.read_back)

    def send(self, number: int) -> None:
        values = list(weights(number).values())
        self.sink.begin(number, number, SinkBounds(5.0, 5.0, lambda: None))
        for layout in self.plan.buckets:
            self.sink.put(layout, [(entry.tensor, values[entry.tensor]) for entry in layout.entries])
        self.sink.finish()

    def sync(self, number: int) -> tuple[ReadBack, ...]:
        self.send(number)
        return self.session.read_back_equal()


def test_what_was_sent_is_found_in_every_worker_and_told() -> None:
    lane = Lane()
    found = lane.sync(1)
    assert [item.elements for item in found] == list(ELEMENTS)
    report = verify_replica(lane.plan, lane.plan.replicas[0], [], [], sync=1, version=1)
    assert "unavailable" in report.verified
    told = with_read_back(report, found)
    assert f"{sum(ELEMENTS)} elements read back equal on 2" in told.verified
    assert told.read_back == found
    assert with_read_back(report, ()) is report
    assert "rollout 0: read-back (hashes of what it holds) at the first sync" in str(lane.plan)


@pytest.mark.parametrize("worker", [0, 1])
def test_one_element_that_is_another_is_caught_and_its_worker_named(worker: int) -> None:
    lane = Lane()
    lane.send(1)
    with torch.no_grad():
        lane.endpoint.engines[worker].model.qkv_proj[0, 0] += 1.0
    with pytest.raises(VerificationError, match=r"qkv_proj \(from q_proj.weight; 1 of 3") as caught:
        lane.session.read_back_equal()
    assert f"worker {worker} of here" in caught.value.what


def test_padding_that_is_another_is_caught() -> None:
    lane = Lane()
    lane.send(1)
    with torch.no_grad():
        lane.endpoint.engines[1].model.embed[7, 3] = 1.0
    with pytest.raises(VerificationError, match=r"in embed \(its padding\)"):
        lane.session.read_back_equal()


def test_experts_repacked_once_all_is_there_are_caught_and_a_failed_first_sync_is_not_the_first() -> None:
    lane = Lane()
    lane.endpoint.engines[0].repacks = True
    with pytest.raises(VerificationError, match="in experts"):
        lane.sync(1)
    lane.endpoint.engines[0].repacks = False
    assert len(lane.sync(2)) == 2


def test_without_reading_back_nothing_is_asked_or_kept_or_seen() -> None:
    # The control: the experts are each other's, and nobody notices.
    lane = Lane(read_back="never")
    lane.endpoint.engines[0].repacks = True
    assert lane.sync(1) == ()
    assert (lane.session.read_back, lane.endpoint.asked) == (None, 0)
    assert "read-back" not in str(lane.plan.schedule)


def test_later_syncs_are_read_back_when_asked() -> None:
    for policy, later in (("first", 0), ("always", 2)):
        lane = Lane(read_back=policy)
        assert len(lane.sync(1)) == 2
        assert len(lane.sync(2)) == later
        assert lane.endpoint.asked == 1 + bool(later)
    assert "read-back (hashes of what it holds)\n" in f"{lane.plan}\n"


def test_what_an_earlier_sync_sent_is_no_part_of_the_next() -> None:
    lane = Lane(read_back="always")
    lane.send(1)
    assert len(lane.sync(2)) == 2


def test_targets_kept_in_another_form_are_told_apart() -> None:
    class FakeForms(FakeTellingEndpoint):
        def trace_workers(self, tensors: Any, timeout_seconds: float) -> tuple[PlacementTable, ...]:
            return tuple(map(_experts_in_form, super().trace_workers(tensors, timeout_seconds)))

    lane = Lane(FakeForms)
    lane.endpoint.engines[0].repacks = True
    found = lane.sync(1)
    assert found == (ReadBack(ELEMENTS[0] - 16, not_comparable=16),) * 2
    report = verify_replica(lane.plan, lane.plan.replicas[0], [], [], sync=1, version=1)
    assert "32 kept in another form and not compared" in with_read_back(report, found).verified


def _experts_in_form(table: PlacementTable) -> PlacementTable:
    targets = tuple(
        structs.replace(target, form="checkpoint") if target.name == "experts" else target
        for target in table.targets
    )
    return structs.replace(table, targets=targets)


def test_an_answer_about_another_table_or_from_fewer_workers_is_none() -> None:
    lane = Lane()
    lane.endpoint.engines.reverse()
    asked = lane.endpoint.read_back
    lane.endpoint.read_back = lambda tables, seconds: asked(tables[::-1], seconds)
    with pytest.raises(ProtocolError, match="read back table"):
        lane.sync(1)
    lane = Lane()
    lane.endpoint.gives = 1
    with pytest.raises(ProtocolError, match="read back 1 workers, and 2 were sent to"):
        lane.sync(1)


def test_an_endpoint_that_cannot_ask_is_refused_where_every_sync_is_to_be_read_back() -> None:
    lane = Lane(FakeQuietEndpoint)
    assert lane.sync(1) == ()
    assert "read-back" not in str(lane.plan.schedule)
    with pytest.raises(PlanError, match="its endpoint cannot ask what its workers hold"):
        Lane(FakeQuietEndpoint, read_back="always")
