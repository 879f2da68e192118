"""An agent that is sent damaged messages among whole ones answers in typed errors and serves nothing torn."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from damage import damaged
from fake_engine import FakeWorkerEngine, ask, attached, begin, load, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane import errors
from weightlane import messages as m
from weightlane.errors import WeightlaneError
from weightlane.failures import Failure

if TYPE_CHECKING:
    import msgspec

TYPED = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, WeightlaneError)
}
REQUESTS: list[msgspec.Struct] = [
    m.Describe("fake"),
    m.Attach(plan()),
    m.Attach(plan(transport="shm", ring={0: "/nowhere"})),
    m.Attach(plan(transport="disk", folder="/nowhere")),
    m.Receive("lane-1", "p1", 1, 10, {0: "first"}, 0.01, 0.01),
    m.CheckResidency("lane-1", "p1", {0: "first"}),
    m.ReceiveDisk("lane-1", "p1", 1, 10, {0: "first"}, "1", "0123456789abcdef"),
    m.FinishInline("lane-1", 1),
    m.Publish("lane-1", 1, 10),
    m.Cancel("lane-1", 1, "because"),
    m.Detach("lane-1"),
]


def whole_sync(number: int) -> list[msgspec.Struct]:
    return [
        m.Attach(plan()),
        begin(number),
        *(load(bucket, sync=number) for bucket in range(3)),
        m.FinishInline("lane-1", number),
        m.Publish("lane-1", number, 10),
    ]


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_every_answer_is_typed_and_a_whole_sync_still_goes_through(seed: int) -> None:
    random = Random(seed)
    engine = FakeWorkerEngine()
    agent = attached(engine)
    known = [*REQUESTS, begin(), load(0), load(1), load(2)]
    for _ in range(12):
        request = random.choice(known)
        written = len(engine.writes)
        data = damaged(request, random) if random.random() < 0.6 else m.encode(request)
        reply = m.decode(agent.handle(data), m.AgentReply, sender="the fake")
        if isinstance(reply, Failure):
            assert reply.error_type in TYPED, reply.traceback
            assert reply.origin == "worker 0 (FakeWorkerEngine)"
        if "publish" in engine.writes[written:]:
            assert agent.servable
        elif len(engine.writes) > written:
            assert not agent.servable
    for request in whole_sync(1):
        ask(agent, request)
    assert (agent.servable, agent.held_version) == (True, 10)
