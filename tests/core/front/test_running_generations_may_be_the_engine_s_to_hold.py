"""Where the engine's own pause holds running requests, a front waits for none, and lets no new ones in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane import messages
from weightlane.errors import NotServableError
from weightlane.facts import EngineFacts
from weightlane.failures import Failure
from weightlane.front.desk import FrontDesk
from weightlane.receiver import WorkerDescription

if TYPE_CHECKING:
    from weightlane.adapters import GenerationDuringSync


class FakePausedEngine:
    """One worker that takes every message."""

    def __init__(self) -> None:
        self.servable = True
        self.desk = FrontDesk(self, origin="test")

    def facts(self) -> EngineFacts:
        return EngineFacts(engine="fake", version="1", source="worker")

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        request: messages.AgentRequest = messages.decode(message, messages.AgentRequest, sender="test")
        if isinstance(request, messages.Describe):
            description = WorkerDescription(0, 1, "host", 1, "a", servable=self.servable)
            return [messages.encode(messages.Described(description))]
        return [messages.encode(messages.Done(0))]

    def call(self, route: str, timeout_seconds: float) -> str:
        return route

    def generate(self, request: messages.Generate) -> messages.Generations:
        return messages.Generations(())

    def shutdown(self) -> None:
        pass


@pytest.fixture
def engine() -> FakePausedEngine:
    return FakePausedEngine()


def tell(engine: FakePausedEngine, request: messages.AgentRequest) -> messages.FrontReply:
    return engine.desk.answer(messages.CallWorkers(messages.encode(request), 0.05))


def begin(engine: FakePausedEngine, generation: GenerationDuringSync) -> messages.FrontReply:
    return tell(engine, messages.BeginInline("A", "digest", 1, 5, {0: "a"}, generation))


def generates(engine: FakePausedEngine) -> bool:
    try:
        with engine.desk._gate.generation(0.01):
            return True
    except NotServableError:
        return False


def test_a_running_generation_is_not_waited_for(engine: FakePausedEngine) -> None:
    with engine.desk._gate.generation():
        assert isinstance(begin(engine, "held"), Failure), (
            "a front without the engine's pause waits, in vain here"
        )
        assert not isinstance(begin(engine, "engine-held"), Failure)
        assert not isinstance(tell(engine, messages.LoadInline("A", 1, 0, b"bytes")), Failure)
        assert not isinstance(tell(engine, messages.FinishInline("A", 1)), Failure)


def test_new_ones_wait_until_the_version_is_published(engine: FakePausedEngine) -> None:
    begin(engine, "engine-held")
    assert not generates(engine)
    tell(engine, messages.FinishInline("A", 1))
    tell(engine, messages.Publish("A", 1, 5))
    assert generates(engine)


def test_after_a_failure_the_workers_decide(engine: FakePausedEngine) -> None:
    begin(engine, "engine-held")
    engine.servable = False
    tell(engine, messages.Cancel("A", 1, "the trainer was killed"))
    assert not generates(engine)
