from __future__ import annotations

import threading
import time

import pytest

from weightlane import messages
from weightlane.errors import EngineError, NotServableError, SyncTimeoutError
from weightlane.facts import EngineFacts
from weightlane.front.desk import FrontDesk
from weightlane.front.gate import GateSync, ServingGate
from weightlane.receiver import WorkerDescription

RECEIVE = messages.Receive("lane", "digest", 1, 5, {0: "a"}, 1.0, 1.0)
PUBLISH = messages.Publish("lane", 1, 5)
CANCEL = messages.Cancel("lane", 1, "rank 1 lost its peer")
REPORT = messages.ReceiveReport(0, 1, 5, 1, 4, 1, "", 0.0, 0.0)
FAILURE = messages.Failure("SyncError", "bucket 3 never came")


class FakeWorkers:
    """An engine whose workers answer what the test says and notice whether generation overlaps a sync."""

    def __init__(self) -> None:
        self.answer: messages.AgentReply = REPORT
        self.servable = True
        self.dead = False
        self.overlaps = 0
        self._inside = 0

    def facts(self) -> EngineFacts:
        return EngineFacts(engine="fake", version="1", source="worker")

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        if self.dead:
            raise EngineError("the worker is gone")
        request: messages.AgentRequest = messages.decode(message, messages.AgentRequest, sender="test")
        if isinstance(request, messages.Describe):
            description = WorkerDescription(0, 1, "host", 1, "a", servable=self.servable)
            return [messages.encode(messages.Described(description))]
        self._enter()
        return [messages.encode(self.answer)]

    def call(self, route: str, timeout_seconds: float) -> str:
        return route

    def generate(self, request: messages.Generate) -> messages.Generations:
        self._enter()
        return messages.Generations(())

    def shutdown(self) -> None:
        pass

    def _enter(self) -> None:
        self._inside += 1
        self.overlaps += self._inside > 1
        time.sleep(0.2)
        self._inside -= 1


@pytest.fixture
def workers() -> FakeWorkers:
    return FakeWorkers()


@pytest.fixture
def desk(workers: FakeWorkers) -> FrontDesk:
    return FrontDesk(workers, origin="test")


def tell(desk: FrontDesk, request: messages.AgentRequest) -> messages.FrontReply:
    return desk.answer(messages.CallWorkers(messages.encode(request), 5.0))


def generate(desk: FrontDesk) -> messages.FrontReply:
    return desk.answer(messages.Generate(((1,),), 1))


def test_a_generation_during_a_sync_waits_until_it_is_published(
    desk: FrontDesk, workers: FakeWorkers
) -> None:
    replies: list[messages.FrontReply] = []
    sync = threading.Thread(target=tell, args=(desk, RECEIVE))
    sync.start()
    time.sleep(0.05)
    asking = threading.Thread(target=lambda: replies.append(generate(desk)))
    asking.start()
    sync.join()
    time.sleep(0.3)
    assert not replies, "received is not published"
    tell(desk, PUBLISH)
    asking.join(5.0)
    assert isinstance(replies[0], messages.Generations)
    assert workers.overlaps == 0


def test_a_sync_waits_for_a_running_generation(desk: FrontDesk, workers: FakeWorkers) -> None:
    asking = threading.Thread(target=generate, args=(desk,))
    asking.start()
    time.sleep(0.05)
    tell(desk, RECEIVE)
    asking.join()
    assert workers.overlaps == 0


def test_without_the_gate_they_would_overlap(workers: FakeWorkers) -> None:
    """Negative control: the fake does notice."""
    asking = threading.Thread(target=workers.generate, args=(messages.Generate((), 1),))
    asking.start()
    time.sleep(0.05)
    workers.call_workers(messages.encode(RECEIVE), 1.0)
    asking.join()
    assert workers.overlaps == 1


@pytest.mark.requirement("R68", part="full weights")
@pytest.mark.parametrize("how", ["failure", "cancel", "dead"])
def test_half_written_weights_are_refused_until_a_sync_is_published(
    desk: FrontDesk, workers: FakeWorkers, how: str
) -> None:
    workers.servable = False
    if how == "failure":
        workers.answer = FAILURE
        tell(desk, RECEIVE)
    elif how == "cancel":
        tell(desk, RECEIVE)
        workers.answer = messages.Done(0)
        tell(desk, CANCEL)
    else:
        workers.dead = True
        tell(desk, RECEIVE)
        workers.dead = False
    refused = generate(desk)
    assert isinstance(refused, messages.Failure)
    assert refused.error_type == "NotServableError"
    cause = {"failure": "bucket 3 never came", "cancel": "rank 1 lost its peer", "dead": "the worker is gone"}
    assert cause[how] in refused.why
    workers.answer, workers.servable = REPORT, True
    tell(desk, RECEIVE)
    tell(desk, PUBLISH)
    assert isinstance(generate(desk), messages.Generations)


def test_a_sync_refused_before_its_first_write_leaves_the_engine_serving(
    desk: FrontDesk, workers: FakeWorkers
) -> None:
    workers.answer = FAILURE
    tell(desk, RECEIVE)
    assert isinstance(generate(desk), messages.Generations)


def test_every_wait_of_the_gate_is_bounded() -> None:
    gate = ServingGate()
    with gate.generation(), pytest.raises(SyncTimeoutError, match=r"sync 1 of lane a waited 0\.1 s for 1"):
        gate.start_sync(GateSync("a", 1), 0.1)
    assert not gate.shut_by(GateSync("a", 1)), "a sync that could not start holds nobody back"
    gate.start_sync(GateSync("a", 2), 0.1)
    told = "for sync 2 of lane a, which was never published"
    with pytest.raises(NotServableError, match=told), gate.generation(0.1):
        pytest.fail("generated during a sync")
