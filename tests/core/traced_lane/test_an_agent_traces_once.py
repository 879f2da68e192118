"""An agent runs the loader without data when it is asked, and keeps what it saw for this incarnation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from packing_engine import SHAPES, WIRES, FakePackingEngine, weights

from weightlane.agent import WorkerAgent
from weightlane.errors import EngineError
from weightlane.failures import Failure, error_of
from weightlane.messages import AgentReply, AgentRequest, Trace, Traced, decode, encode
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.table import Untraced


def agent_of(engine: Any) -> WorkerAgent:
    return WorkerAgent(lambda backend: engine, origin="worker 0 (Fake)")


def ask(agent: WorkerAgent, request: AgentRequest) -> Any:
    reply: AgentReply = decode(agent.handle(encode(request)), AgentReply, sender="the fake")
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply


def test_the_table_arrives_whole_and_nothing_is_written() -> None:
    engine = FakePackingEngine()
    engine.load_weights(list(weights().items()))
    engine.writes.clear()
    before = {name: (id(t), t.clone()) for name, t in engine.live_tensors().items()}
    answer = ask(agent_of(engine), Trace("fake", WIRES))
    assert isinstance(answer, Traced)
    assert coverage_problems([answer.table], {}, receiver="it") == []
    assert [source.canonical for source in answer.table.sources] == list(SHAPES)
    assert engine.writes == []
    for name, tensor in engine.live_tensors().items():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))


def test_the_same_question_is_traced_once_an_incarnation() -> None:
    engine = FakePackingEngine()
    agent = agent_of(engine)
    first = ask(agent, Trace("fake", WIRES))
    assert ask(agent, Trace("fake", WIRES)) == first
    assert engine.traces == 1
    ask(agent, Trace("fake", WIRES[1:]))
    ask(agent, Trace("fake", (replace(WIRES[0], dtype="bfloat16"), *WIRES[1:])))
    assert engine.traces == 3
    engine.incarnation = "second"
    ask(agent, Trace("fake", WIRES))
    assert engine.traces == 4


def test_few_tables_are_kept_and_those_used_last() -> None:
    engine = FakePackingEngine()
    agent = agent_of(engine)
    for kept in range(1, 5):
        ask(agent, Trace("fake", WIRES[:kept]))
    ask(agent, Trace("fake", WIRES[:1]))
    ask(agent, Trace("fake", WIRES[:5]))
    assert engine.traces == 5
    ask(agent, Trace("fake", WIRES[:1]))
    assert engine.traces == 5
    ask(agent, Trace("fake", WIRES[:2]))
    assert engine.traces == 6


def test_an_engine_that_cannot_is_untraced_and_says_which() -> None:
    class FakeEngineWithoutTrace:
        current_incarnation = staticmethod(lambda: "first")

    answer = ask(agent_of(FakeEngineWithoutTrace()), Trace("fake", WIRES))
    assert answer == Untraced("FakeEngineWithoutTrace of worker 0 (Fake) cannot run its loader without data")


def test_an_engine_that_fails_to_trace_is_an_error_not_untraced() -> None:
    engine = FakePackingEngine()
    engine.trace = lambda tensors: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        ask(agent_of(engine), Trace("fake", WIRES))
