"""The agent's part: one load, whole, in memory of its own; the old one serves until the new one may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_adapter_engine import (
    MODULES,
    NAMES,
    WIRES,
    FakeAdapterEngine,
    ask,
    attached,
    begin,
    buckets,
    full_plan,
    load,
    plan,
    stage,
    values,
    whole_sync,
)

from weightlane import adapter_collector
from weightlane.adapters import adapter_ref
from weightlane.agent import WorkerAgent
from weightlane.errors import (
    EngineError,
    NotServableError,
    PlanError,
    ProtocolError,
    SyncError,
    VerificationError,
)
from weightlane.messages import Attach, BeginInline, Cancel, Detach, FinishInline, LoadInline, Publish
from weightlane.packing import pack_bucket, unpack_bucket

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.agent_state import OpenSync
    from weightlane.buckets import BucketLayout


@pytest.fixture
def engine() -> FakeAdapterEngine:
    return FakeAdapterEngine()


@pytest.fixture
def agent(engine: FakeAdapterEngine) -> WorkerAgent:
    return attached(engine)


def assert_serves(engine: FakeAdapterEngine, version: int) -> None:
    assert {name: float(tensor.flatten()[0]) for name, tensor in engine.served.items()} == {
        name: float(tensor.flatten()[0]) for name, tensor in values(version).items()
    }


# -- one load, complete (R55) ---------------------------------------------------------------------------


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("empty_last", [False, True])
def test_three_buckets_end_in_exactly_one_load_with_every_matrix(
    engine: FakeAdapterEngine, empty_last: bool
) -> None:
    layouts = buckets(empty_last=empty_last)
    assert len(layouts) == 3 + empty_last
    agent = attached(engine, plan(buckets=layouts))
    begin(agent, 1, 10)
    for bucket in range(len(layouts)):
        load(agent, 1, bucket, values(10), layouts)
        assert engine.calls == []
    report = ask(agent, FinishInline("lane-1", 1))
    assert engine.calls == ["load policy.0"]
    assert list(engine.slots["policy.0"].tensors) == list(NAMES)
    assert (report.tensors, report.loaded) == (6, 6)
    assert [bound.module for bound in report.adapter.modules] == list(MODULES)


@pytest.mark.requirement("R55")
def test_control_an_agent_that_loads_bucket_by_bucket_is_seen(engine: FakeAdapterEngine) -> None:
    """The rule undone: the engine is given a third of the adapter each time, and would serve the last."""

    class BucketByBucket(WorkerAgent):
        def _load(self, opened: OpenSync, layout: BucketLayout, tensors: list[tuple[str, Tensor]]) -> None:
            super()._load(opened, layout, tensors)
            self._swap.load(engine, opened.plan, dict(tensors), opened.version)

    with pytest.raises(VerificationError, match=r"1 of 3 modules, not to layers\.0\.v, layers\.1\.q"):
        stage(attached(engine, kind=BucketByBucket), 1, 10)


# -- owned (R56) ----------------------------------------------------------------------------------------


def sync_through_one_buffer(agent: WorkerAgent, version: int) -> None:
    """As a ring does it: each bucket is written over the one before, and the last over with rubbish."""
    begin(agent, 1, version)
    memory = torch.zeros(max(layout.nbytes for layout in buckets()), dtype=torch.uint8)
    ordered = list(values(version).values())
    for layout in buckets():
        bucket = memory[: layout.nbytes]
        given = [(entry.tensor, ordered[entry.tensor]) for entry in layout.entries]
        pack_bucket(bucket, layout, WIRES, given)
        agent.load_by_reference("lane-1", 1, layout.index, unpack_bucket(bucket, layout, WIRES))
    memory.fill_(255)
    ask(agent, FinishInline("lane-1", 1))
    ask(agent, Publish("lane-1", 1, version))


@pytest.mark.requirement("R56")
def test_values_stay_when_the_buffer_is_written_again(engine: FakeAdapterEngine, agent: WorkerAgent) -> None:
    sync_through_one_buffer(agent, 10)
    assert_serves(engine, 10)


@pytest.mark.requirement("R56")
def test_control_without_the_copy_other_values_are_served(
    engine: FakeAdapterEngine, agent: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_collector, "owned", lambda tensor: tensor)
    sync_through_one_buffer(agent, 10)
    assert not any(torch.equal(engine.served[name], tensor) for name, tensor in values(10).items())


# -- removed once and last (R57) ------------------------------------------------------------------------


@pytest.mark.requirement("R57")
def test_the_old_adapter_goes_once_and_only_after_the_new_one_serves(
    engine: FakeAdapterEngine, agent: WorkerAgent
) -> None:
    for sync in (1, 2, 3):
        whole_sync(agent, sync, 10 + sync)
        assert_serves(engine, 10 + sync)
    assert engine.calls == [
        "load policy.0",
        "serve policy.0",
        "load policy.1",
        "serve policy.1",
        "remove policy.0",
        "load policy.0",
        "serve policy.0",
        "remove policy.1",
    ]
    assert list(engine.slots) == ["policy.0"]


@pytest.mark.requirement("R57")
def test_paused_removes_once_before_its_one_slot_is_filled_and_is_fenced_meanwhile(
    engine: FakeAdapterEngine,
) -> None:
    agent = attached(engine, plan("paused"))
    whole_sync(agent, 1, 11)
    stage(agent, 2, 12)
    assert not agent.servable
    ask(agent, Publish("lane-1", 2, 12))
    assert agent.servable
    assert engine.calls == [
        "load policy.0", "serve policy.0", "remove policy.0", "load policy.0", "serve policy.0",
    ]  # fmt: skip


def test_names_for_requests_change_with_two_slots_and_stay_when_paused() -> None:
    config = plan().adapter.config  # type: ignore[union-attr]
    assert [adapter_ref(config, "two_slot", version).name for version in (7, 8)] == ["policy@7", "policy@8"]
    assert [adapter_ref(config, "paused", version).name for version in (7, 8)] == ["policy", "policy"]


# -- a failure keeps the old one, or says that nothing serves (R68) -------------------------------------


@pytest.mark.requirement("R68")
@pytest.mark.parametrize(
    "how", ["load raises", "bound in part", "bound to nothing", "other scale", "cancelled"]
)
def test_a_failed_sync_leaves_the_old_adapter_serving_and_the_next_one_heals(
    engine: FakeAdapterEngine, agent: WorkerAgent, how: str
) -> None:
    whole_sync(agent, 1, 11)
    engine.calls.clear()
    if how == "load raises":
        engine.raises["load"] = RuntimeError("no room")
        with pytest.raises(EngineError, match="no room"):
            stage(agent, 2, 12)
    elif how == "cancelled":
        stage(agent, 2, 12)
        ask(agent, Cancel("lane-1", 2, "replica 1 died"))
    else:
        engine.loses = {"bound in part": MODULES[1:2], "bound to nothing": MODULES}.get(how, ())
        engine.scale = 0.5 if how == "other scale" else 1.0
        words = {
            "bound in part": r"2 of 3 modules, not to layers\.0\.v",
            "bound to nothing": r"none of its 3 modules \(layers\.0\.q, layers\.0\.v, layers\.1\.q\)",
            "other scale": r"scale is 2, but the engine applies layers\.0\.q 1",
        }[how]
        with pytest.raises(VerificationError, match=words):
            stage(agent, 2, 12)
    assert agent.servable
    assert agent.held_version == 11
    assert_serves(engine, 11)
    assert list(engine.slots) == ["policy.0"]
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 2, 12))
    engine.raises, engine.loses, engine.scale = {}, (), 1.0
    whole_sync(agent, 3, 13)
    assert_serves(engine, 13)


@pytest.mark.requirement("R68")
@pytest.mark.parametrize("call", ["serve", "remove"])
def test_where_it_is_not_known_what_serves_the_worker_says_so_until_a_sync_succeeds(
    engine: FakeAdapterEngine, agent: WorkerAgent, call: str
) -> None:
    whole_sync(agent, 1, 11)
    stage(agent, 2, 12)
    engine.raises[call] = RuntimeError("stuck")
    with pytest.raises(EngineError, match="stuck"):
        ask(agent, Publish("lane-1", 2, 12))
    ask(agent, Cancel("lane-1", 2, "the commit failed"))
    with pytest.raises(NotServableError, match=r"the commit failed|could not be removed"):
        agent.require_servable()
    engine.raises.clear()
    whole_sync(agent, 3, 13)
    assert agent.servable
    assert_serves(engine, 13)


def test_paused_a_failure_leaves_nothing_serving_and_says_so(engine: FakeAdapterEngine) -> None:
    agent = attached(engine, plan("paused"))
    whole_sync(agent, 1, 11)
    engine.loses = MODULES[:1]
    with pytest.raises(VerificationError):
        stage(agent, 2, 12)
    assert (engine.slots, agent.servable) == ({}, False)
    with pytest.raises(NotServableError, match=r"layers\.0\.q"):
        agent.require_servable()
    engine.loses = ()
    whole_sync(agent, 3, 13)
    assert_serves(engine, 13)


def test_a_lane_that_goes_takes_what_it_never_published_with_it(
    engine: FakeAdapterEngine, agent: WorkerAgent
) -> None:
    whole_sync(agent, 1, 11)
    stage(agent, 2, 12)
    ask(agent, Detach("lane-1"))
    assert list(engine.slots) == ["policy.0"]
    assert_serves(engine, 11)


# -- refused before anything is loaded ------------------------------------------------------------------


def test_a_matrix_that_comes_twice_or_never_is_refused(engine: FakeAdapterEngine, agent: WorkerAgent) -> None:
    begin(agent, 1, 10)
    named = list(values(10).items())
    agent.load_by_reference("lane-1", 1, 0, named[:2])
    with pytest.raises(SyncError, match=rf"{NAMES[0]} came twice"):
        agent.load_by_reference("lane-1", 1, 1, named[:2])
    begin(agent, 2, 10)
    for bucket in range(3):
        agent.load_by_reference("lane-1", 2, bucket, named[2:4] if bucket == 1 else [])
    with pytest.raises(SyncError, match=rf"incomplete: {NAMES[0]} and 3 more never came"):
        ask(agent, FinishInline("lane-1", 2))
    assert engine.calls == []
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, LoadInline("lane-1", 2, 0, b""))


@pytest.mark.requirement("R67")
def test_a_plan_whose_adapter_was_lost_on_the_way_is_refused(engine: FakeAdapterEngine) -> None:
    """What a transport that drops the configuration does (verl #7495): matrices, and nothing to bind."""
    with pytest.raises(PlanError, match="phase is adapter, and it comes without one"):
        attached(engine, plan(adapter=None))


def test_an_engine_without_adapters_refuses_by_name(engine: FakeAdapterEngine) -> None:
    class Plain:
        def __getattr__(self, name: str) -> Any:
            if "adapter" in name:
                raise AttributeError(name)
            return getattr(engine, name)

    with pytest.raises(PlanError, match=r"worker engine of fake has no load_adapter.*mode merged or full"):
        attached(Plain())


def test_full_weights_written_meanwhile_take_the_adapter_with_them_and_end_the_lane(
    engine: FakeAdapterEngine, agent: WorkerAgent
) -> None:
    whole_sync(agent, 1, 11)
    engine.calls.clear()
    ask(agent, Attach(full_plan()))
    begin(agent, 1, 20, lane="lane-2")
    agent.load_by_reference("lane-2", 1, 0, [(wire.name, torch.zeros(8, 8)) for wire in full_plan().tensors])
    assert engine.calls == ["begin", "remove policy.0", "load_weights"]
    with pytest.raises(PlanError, match=r"\[residency\].*half-written"):
        ask(agent, Attach(plan(lane="lane-3")))
    ask(agent, FinishInline("lane-2", 1))
    ask(agent, Publish("lane-2", 1, 20))
    with pytest.raises(SyncError, match="does not hold the base any more"):
        ask(agent, BeginInline("lane-1", "p1", 2, 12, {0: "first"}))
    ask(agent, Attach(plan()))
    whole_sync(agent, 3, 13)
    assert_serves(engine, 13)
