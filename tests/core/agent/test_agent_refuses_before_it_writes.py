"""Whatever is wrong before the first write leaves the worker as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine import WIRES, FakeWorkerEngine, agent_of_fake, ask, attached, begin, load, plan
from msgspec.structs import replace

from weightlane.agents import agent_of
from weightlane.buckets import lay_out_buckets
from weightlane.errors import EngineError, PlanError, Problem, ProtocolError, SyncError
from weightlane.messages import (
    AgentReply,
    Attach,
    Describe,
    Detach,
    Failure,
    FinishInline,
    Publish,
    Receive,
    WireTensor,
    decode,
)


def assert_untouched(engine: FakeWorkerEngine, agent: Any) -> None:
    assert engine.writes == []
    assert agent.servable
    agent.require_servable()


@pytest.mark.requirement("R66")
def test_a_bad_plan_is_refused_with_everything_that_is_wrong() -> None:
    engine = FakeWorkerEngine()
    agent = agent_of_fake(engine)
    wires = (replace(WIRES[0], shape=(4,)), WireTensor("bb", (2,), "bool"), WireTensor("bb", (2,), "bool"))
    with pytest.raises(PlanError) as caught:
        ask(agent, Attach(plan(tensors=wires, buckets=lay_out_buckets(wires)[:0])))
    assert {(problem.kind, problem.subject) for problem in caught.value.problems} == {
        ("duplicate-name", "bb"),
        ("layout", "buckets"),
        ("shape", "a"),
        ("extra-name", "bb"),
        ("missing-name", "b"),
        ("missing-name", "c"),
    }
    assert_untouched(engine, agent)
    with pytest.raises(SyncError, match="it holds none"):
        ask(agent, begin())


def test_the_engines_own_problems_come_with_the_others() -> None:
    engine = FakeWorkerEngine()
    engine.problems = [Problem("quantization", "engine", "its weights are packed")]
    wires = (*WIRES[:2], replace(WIRES[2], shape=(41,)))
    with pytest.raises(PlanError) as caught:
        ask(agent_of_fake(engine), Attach(plan(tensors=wires, buckets=lay_out_buckets(wires))))
    assert [problem.kind for problem in caught.value.problems] == ["shape", "quantization"]


def test_a_good_plan_is_accepted() -> None:
    engine = FakeWorkerEngine(worker=3)
    assert ask(agent_of_fake(engine), Attach(plan())).worker == 3
    assert engine.writes == []


def test_a_refused_plan_leaves_the_one_before_in_place() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    with pytest.raises(PlanError):
        ask(agent, Attach(plan(plan_digest="p2", buckets=())))
    with pytest.raises(ProtocolError, match="no ring for worker 0"):
        ask(agent, Attach(plan(plan_digest="p2", transport="shm", ring={1: "/dev/shm/x"})))  # noqa: S108
    with pytest.raises(ProtocolError, match="cannot be opened"):
        ask(agent, Attach(plan(plan_digest="p2", transport="shm", ring={0: "/no/such/ring"})))
    ask(agent, begin())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"plan_digest": "p2"}, "does not hold plan p2 .*it holds p1"),
        ({"lane": "lane-2"}, "it holds none"),
        ({"incarnation": {0: "second"}}, "is incarnation first, the plan was made for second"),
        ({"incarnation": {1: "first"}}, "made for None"),
    ],
)
def test_another_plan_or_incarnation_is_refused(changed: dict[str, Any], told: str) -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    with pytest.raises(SyncError, match=told):
        ask(agent, begin(**changed))
    receive = {"lane": "lane-1", "plan_digest": "p1", "incarnation": {0: "first"}} | changed
    with pytest.raises(SyncError, match=told):
        ask(agent, Receive(**receive, sync=1, version=10, wait_seconds=1, lost_after_seconds=1))
    assert_untouched(engine, agent)
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, load(0))


def test_an_engine_made_anew_since_connect_is_refused() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    engine.incarnation = "second"
    with pytest.raises(SyncError, match="made anew"):
        ask(agent, begin())
    assert_untouched(engine, agent)


def test_a_ring_is_not_read_where_there_is_none() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    with pytest.raises(ProtocolError, match="no ring"):
        ask(agent, Receive("lane-1", "p1", 1, 10, {0: "first"}, 1.0, 1.0))
    assert_untouched(engine, agent)


def test_a_sync_that_was_only_opened_writes_nothing() -> None:
    # Another worker may refuse it: this one must go on serving what it has.
    engine = FakeWorkerEngine()
    agent = attached(engine)
    ask(agent, begin())
    assert_untouched(engine, agent)
    with pytest.raises(ProtocolError, match="after 0 of 3 buckets"):
        ask(agent, FinishInline("lane-1", 1))
    assert_untouched(engine, agent)


def test_an_engine_that_refuses_to_begin_is_left_as_it_was() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    engine.raises["begin"] = RuntimeError("busy")
    ask(agent, begin())
    with pytest.raises(EngineError, match="busy"):
        ask(agent, load(0))
    assert agent.servable
    with pytest.raises(ProtocolError, match="not open"):
        ask(agent, load(0))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81\xa4type\xa4exec", b"\x81\xa1a" * 5000])
def test_bytes_that_are_no_message_are_answered(data: bytes) -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    reply: Any = decode(agent.handle(data), AgentReply, sender="the fake")
    assert isinstance(reply, Failure)
    assert (reply.error_type, reply.origin) == ("ProtocolError", "worker 0 (FakeWorkerEngine)")
    assert_untouched(engine, agent)


def test_an_error_that_cannot_be_encoded_is_answered_too() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    engine.raises["load_weights"] = OSError(b"/\xff".decode(errors="surrogateescape"))
    ask(agent, begin())
    with pytest.raises(EngineError, match=r"OSError: /\?"):
        ask(agent, load(0))


def test_detach_drops_the_plan_and_is_idempotent() -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    for _ in range(2):
        ask(agent, Detach("lane-1"))
    with pytest.raises(SyncError, match="it holds none"):
        ask(agent, begin())
    with pytest.raises(SyncError, match="cannot be published"):
        ask(agent, Publish("lane-1", 1, 10))


def test_a_worker_has_one_agent_that_does_not_outlive_it() -> None:
    import gc
    import weakref

    class FakeWorker:
        rank = 4

    worker = FakeWorker()
    agent = agent_of(worker)
    assert agent_of(worker) is agent
    assert agent_of(FakeWorker()) is not agent
    reply: Any = decode(agent.handle(b""), AgentReply, sender="the fake")
    assert reply.origin.startswith("worker 4 (FakeWorker, process ")
    gone = weakref.ref(worker)
    del worker, agent
    gc.collect()
    assert gone() is None


def test_a_backend_that_is_not_there_is_told() -> None:
    class FakeWorker: ...

    from weightlane.errors import PluginError

    with pytest.raises(PluginError, match="no-such-backend"):
        ask(agent_of(FakeWorker()), Describe("no-such-backend"))


def test_the_fake_holds_what_it_is_sent() -> None:
    # The control of all refusals above.
    engine = FakeWorkerEngine()
    agent = attached(engine)
    ask(agent, begin())
    for bucket in range(3):
        ask(agent, load(bucket))
    ask(agent, FinishInline("lane-1", 1))
    assert torch.equal(engine.held["a"], torch.arange(3.0))
