"""Two trainers at one engine: what ends one's sync must not let generation into the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane import messages
from weightlane.errors import NotServableError
from weightlane.facts import EngineFacts
from weightlane.failures import Failure
from weightlane.front.desk import FrontDesk
from weightlane.front.gate import GateSync, ServingGate
from weightlane.receiver import WorkerDescription

if TYPE_CHECKING:
    from weightlane.adapters import GenerationDuringSync


class FakeWorkers:
    """One worker with an agent's rules: one sync is open, what is not open fails, the first bucket fences.

    `refuses` names message kinds that fail as they come; `wrote_beside` counts buckets that came while a
    generation could have started.
    """

    def __init__(self) -> None:
        self.open: GateSync | None = None
        self.servable = True
        self.refuses: set[type] = set()
        self.wrote_beside = 0
        self.desk = FrontDesk(self, origin="test")

    def facts(self) -> EngineFacts:
        return EngineFacts(engine="fake", version="1", source="worker")

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        request: messages.AgentRequest = messages.decode(message, messages.AgentRequest, sender="test")
        return [messages.encode(self._reply(request))]

    def _reply(self, request: messages.AgentRequest) -> messages.AgentReply:
        if isinstance(request, messages.Describe):
            return messages.Described(WorkerDescription(0, 1, "host", 1, "a", servable=self.servable))
        if type(request) in self.refuses:
            return Failure("SyncError", "refused")
        if isinstance(request, messages.BeginInline):
            self.open = GateSync(request.lane, request.sync)
        if isinstance(request, messages.LoadInline):
            if self.open != GateSync(request.lane, request.sync):
                return Failure("ProtocolError", "not open")
            self.servable = False
            self.wrote_beside += generates(self)
        if isinstance(request, messages.Publish):
            self.servable = True
        return messages.Done(0)

    def call(self, route: str, timeout_seconds: float) -> str:
        return route

    def generate(self, request: messages.Generate) -> messages.Generations:
        return messages.Generations(())

    def shutdown(self) -> None:
        pass


@pytest.fixture
def workers() -> FakeWorkers:
    return FakeWorkers()


def tell(workers: FakeWorkers, request: messages.AgentRequest) -> messages.FrontReply:
    return workers.desk.answer(messages.CallWorkers(messages.encode(request), 1.0))


def begin(workers: FakeWorkers, lane: str, generation: GenerationDuringSync = "held") -> None:
    tell(workers, messages.BeginInline(lane, "digest", 1, 5, {0: "a"}, generation))


def load(workers: FakeWorkers, lane: str) -> None:
    tell(workers, messages.LoadInline(lane, 1, 0, b"bytes"))


def publish(workers: FakeWorkers, lane: str) -> None:
    tell(workers, messages.FinishInline(lane, 1))
    tell(workers, messages.Publish(lane, 1, 5))


def generates(workers: FakeWorkers) -> bool:
    try:
        with workers.desk._gate.generation(0.01):
            return True
    except NotServableError:
        return False


def replaced_in_the_middle(workers: FakeWorkers) -> bool:
    """A begins; B, its replacement, begins; A's next bucket fails. Whether generation gets into B's sync."""
    begin(workers, "A")
    begin(workers, "B")
    load(workers, "A")
    between = generates(workers)
    load(workers, "B")
    load(workers, "B")
    return between or bool(workers.wrote_beside)


def test_the_failure_of_a_replaced_sync_does_not_open_the_gate_of_the_next(workers: FakeWorkers) -> None:
    assert not replaced_in_the_middle(workers)
    assert not generates(workers)
    publish(workers, "B")
    assert generates(workers)


def test_control_where_any_end_opens_generation_runs_between_buckets(
    workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule undone: whoever fails asks whether the workers are whole, and opens."""
    monkeypatch.setattr(ServingGate, "waits_for_another", lambda gate, sync: False)
    monkeypatch.setattr(ServingGate, "_leave", lambda gate, sync: gate._shut_by.clear())
    monkeypatch.setattr(ServingGate, "go_on", lambda gate, sync, seconds: None)
    assert replaced_in_the_middle(workers)
    assert workers.wrote_beside == 2


def test_a_cancel_of_another_sync_opens_nothing(workers: FakeWorkers) -> None:
    begin(workers, "A")
    begin(workers, "B")
    tell(workers, messages.Cancel("A", 1, "its trainer gave up"))
    assert not generates(workers)
    tell(workers, messages.Cancel("B", 2, "a sync that never began"))
    assert not generates(workers)
    tell(workers, messages.Cancel("B", 1, "nothing was written"))
    assert generates(workers)


def test_a_sync_that_is_refused_leaves_the_gate_to_the_one_in_progress(workers: FakeWorkers) -> None:
    begin(workers, "A")
    workers.refuses = {messages.BeginInline}
    begin(workers, "B")
    assert not generates(workers)
    load(workers, "A")
    begin(workers, "B")
    assert not generates(workers)
    publish(workers, "A")
    assert generates(workers)
    assert workers.wrote_beside == 0


def test_a_sync_whose_trainer_was_killed_holds_nobody_after_the_next_one(workers: FakeWorkers) -> None:
    begin(workers, "A")
    begin(workers, "B")
    tell(workers, messages.Cancel("B", 1, "nothing was written"))
    assert generates(workers), "the worker has forgotten A's sync with B's first message"


def test_a_bucket_that_comes_when_the_gate_is_open_shuts_it_first(workers: FakeWorkers) -> None:
    begin(workers, "A")
    tell(workers, messages.Cancel("A", 1, "one that this worker lost"))
    assert generates(workers)
    load(workers, "A")
    assert workers.wrote_beside == 0
    assert not generates(workers)


def test_buckets_of_a_sync_during_which_generation_goes_on_shut_nothing(workers: FakeWorkers) -> None:
    begin(workers, "A", "goes-on")
    load(workers, "A")
    tell(workers, messages.FinishInline("A", 1))
    assert generates(workers)


def test_what_only_looks_like_a_bucket_shuts_nothing(workers: FakeWorkers) -> None:
    begin(workers, "A")
    tell(workers, messages.Cancel("A", 1, "over"))
    message = messages.encode(messages.LoadInline("A", 1, 0, b"bytes")).replace(b"bucket", b"basket")
    reply = workers.desk.answer(messages.CallWorkers(message, 1.0))
    assert isinstance(reply, Failure)
    assert reply.error_type == "ProtocolError"
    assert generates(workers)
