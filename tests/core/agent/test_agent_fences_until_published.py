"""From the first write of a sync to its publication the worker is not servable, whatever happens between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fake_engine import WEIGHTS, WIRES, FakeWorkerEngine, ask, attached, begin, load, plan
from msgspec.structs import replace

from weightlane.errors import EngineError, NotServableError, ProtocolError, SyncError
from weightlane.messages import Attach, Cancel, Describe, Detach, FinishInline, Publish
from weightlane.packing import WireDigest, memory_of

if TYPE_CHECKING:
    from weightlane.agent import WorkerAgent


@pytest.fixture
def engine() -> FakeWorkerEngine:
    return FakeWorkerEngine()


@pytest.fixture
def agent(engine: FakeWorkerEngine) -> WorkerAgent:
    return attached(engine)


def whole_sync(agent: WorkerAgent, sync: int, version: int) -> None:
    ask(agent, begin(sync, version))
    for bucket in range(3):
        ask(agent, load(bucket, sync=sync))
    ask(agent, FinishInline("lane-1", sync))


def test_fenced_from_the_first_bucket_to_publication(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    ask(agent, begin())
    assert agent.servable
    for bucket in range(3):
        ask(agent, load(bucket))
        assert not agent.servable
    report = ask(agent, FinishInline("lane-1", 1))
    assert not agent.servable
    with pytest.raises(NotServableError, match="is not published"):
        agent.require_servable()
    described = ask(agent, Describe("fake")).description
    assert (described.servable, described.held_version) == (False, None)

    ask(agent, Publish("lane-1", 1, 10))
    assert (agent.servable, agent.held_version) == (True, 10)
    described = ask(agent, Describe("fake")).description
    assert (described.servable, described.held_version) == (True, 10)
    assert engine.writes == ["begin", "load_weights", "load_weights", "load_weights", "finish", "publish"]

    assert {name: bytes(memory_of(t)) for name, t in engine.held.items()} == {
        name: bytes(memory_of(t)) for name, t in WEIGHTS.items()
    }
    digest = WireDigest(WIRES)
    for tensor in WEIGHTS.values():
        digest.update_whole(memory_of(tensor))
    assert (report.tensors, report.nbytes, report.loaded) == (3, 12 + 2 + 80, 3)
    assert report.digest == digest.hexdigest()


def test_buckets_out_of_order_twice_or_of_another_sync_are_refused(
    engine: FakeWorkerEngine, agent: WorkerAgent
) -> None:
    ask(agent, begin())
    with pytest.raises(ProtocolError, match="Bucket 1 of sync 1 came where bucket 0 was due"):
        ask(agent, load(1))
    ask(agent, load(0))
    with pytest.raises(ProtocolError, match="Bucket 0 of sync 1 came where bucket 1 was due"):
        ask(agent, load(0))
    with pytest.raises(ProtocolError, match="Sync 2 of lane lane-1 is not open"):
        ask(agent, load(1, sync=2))
    with pytest.raises(ProtocolError, match="after 1 of 3 buckets"):
        ask(agent, FinishInline("lane-1", 1))
    assert engine.writes == ["begin", "load_weights"]


@pytest.mark.parametrize("change", [-1, 1, -64])
def test_a_payload_of_another_length_is_refused(
    engine: FakeWorkerEngine, agent: WorkerAgent, change: int
) -> None:
    ask(agent, begin())
    message = load(0)
    payload = message.payload[:change] if change < 0 else message.payload + b"x" * change
    with pytest.raises(ProtocolError, match=f"has {len(payload)} bytes"):
        ask(agent, replace(message, payload=payload))
    assert engine.writes == []


def test_nothing_is_published_that_was_not_verified(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    with pytest.raises(SyncError, match="Version 10 cannot be published"):
        ask(agent, Publish("lane-1", 1, 10))
    ask(agent, begin())
    ask(agent, load(0))
    with pytest.raises(SyncError, match="has not completed"):
        ask(agent, Publish("lane-1", 1, 10))
    for bucket in (1, 2):
        ask(agent, load(bucket))
    ask(agent, FinishInline("lane-1", 1))
    for wrong in (Publish("lane-1", 1, 11), Publish("lane-1", 2, 10), Publish("lane-2", 1, 10)):
        with pytest.raises(SyncError, match="cannot be published"):
            ask(agent, wrong)
    assert not agent.servable
    ask(agent, Publish("lane-1", 1, 10))
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 1, 10))


@pytest.mark.requirement("R68", part="full weights")
@pytest.mark.parametrize("step", ["load_weights", "finish"])
def test_a_failure_after_the_first_write_fences_until_a_later_sync_succeeds(
    engine: FakeWorkerEngine, agent: WorkerAgent, step: str
) -> None:
    whole_sync(agent, 1, 10)
    ask(agent, Publish("lane-1", 1, 10))
    engine.raises[step] = KeyError("lm_head.weight")
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        whole_sync(agent, 2, 11)
    with pytest.raises(NotServableError, match=r"Sync 2 failed after its first write: KeyError.*lm_head"):
        agent.require_servable()
    # The failed sync is over: neither its rest nor its version can come.
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, FinishInline("lane-1", 2))
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 2, 11))
    engine.raises.clear()
    whole_sync(agent, 3, 12)
    assert not agent.servable
    ask(agent, Publish("lane-1", 3, 12))
    assert (agent.servable, agent.held_version) == (True, 12)


@pytest.mark.requirement("R68", part="full weights")
def test_a_failure_to_publish_fences(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    whole_sync(agent, 1, 10)
    engine.raises["publish"] = RuntimeError("no")
    with pytest.raises(EngineError):
        ask(agent, Publish("lane-1", 1, 10))
    assert (agent.servable, agent.held_version) == (False, None)


@pytest.mark.requirement("R68", part="full weights")
def test_cancel_ends_a_sync_and_its_cause_is_kept(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    whole_sync(agent, 1, 10)
    ask(agent, Cancel("lane-1", 1, "replica 1 died"))
    with pytest.raises(NotServableError, match="replica 1 died"):
        agent.require_servable()
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 1, 10))


def test_cancel_before_the_first_write_changes_nothing(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    ask(agent, begin())
    ask(agent, Cancel("lane-1", 1, "another worker refused"))
    assert agent.servable
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, load(0))


@pytest.mark.parametrize("stray", [Cancel("lane-1", 1, "late"), Cancel("lane-2", 2, "another lane's")])
def test_a_late_or_foreign_cancel_does_not_end_the_sync_that_is_open(
    engine: FakeWorkerEngine, agent: WorkerAgent, stray: Cancel
) -> None:
    ask(agent, begin(2, 10))
    ask(agent, load(0, sync=2))
    ask(agent, stray)
    for bucket in (1, 2):
        ask(agent, load(bucket, sync=2))
    ask(agent, FinishInline("lane-1", 2))
    ask(agent, stray)
    ask(agent, Publish("lane-1", 2, 10))
    ask(agent, stray)
    assert agent.servable


def test_two_lanes_do_not_mix_on_one_worker(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    ask(agent, Attach(plan(lane="lane-2", plan_digest="p2")))
    ask(agent, begin())
    ask(agent, load(0))
    ask(agent, begin(lane="lane-2", plan_digest="p2"))
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, load(1))
    assert not agent.servable


def test_detach_after_staging_leaves_the_worker_fenced(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    whole_sync(agent, 1, 10)
    ask(agent, Detach("lane-1"))
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 1, 10))
    assert not agent.servable


def test_by_reference_is_counted_fenced_and_ordered_alike(
    engine: FakeWorkerEngine, agent: WorkerAgent
) -> None:
    ask(agent, begin())
    named = list(WEIGHTS.items())
    with pytest.raises(ProtocolError, match="bucket 0 was due"):
        agent.load_by_reference("lane-1", 1, 1, named[1:2])
    assert agent.servable
    for bucket, layout in enumerate(plan().buckets):
        agent.load_by_reference("lane-1", 1, bucket, [named[entry.tensor] for entry in layout.entries])
        assert not agent.servable
    assert ask(agent, FinishInline("lane-1", 1)).loaded == 3
    assert torch.equal(engine.held["c"], WEIGHTS["c"])


def test_a_failure_by_reference_ends_the_sync(engine: FakeWorkerEngine, agent: WorkerAgent) -> None:
    ask(agent, begin())
    engine.raises["load_weights"] = RuntimeError("shape")
    with pytest.raises(RuntimeError, match="shape"):
        agent.load_by_reference("lane-1", 1, 0, list(WEIGHTS.items())[:1])
    with pytest.raises(ProtocolError, match="not open"):
        agent.load_by_reference("lane-1", 1, 0, list(WEIGHTS.items())[:1])
    assert not agent.servable


def test_no_digest_is_made_at_level_counts(engine: FakeWorkerEngine) -> None:
    agent = attached(engine, verify="counts")
    ask(agent, begin())
    for bucket in range(3):
        ask(agent, load(bucket))
    assert ask(agent, FinishInline("lane-1", 1)).digest == ""
