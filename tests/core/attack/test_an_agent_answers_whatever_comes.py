"""An agent that is sent damaged messages among whole ones answers in typed errors and serves nothing torn."""

from __future__ import annotations

import typing
from random import Random
from typing import TYPE_CHECKING

import fake_adapter_engine as adapters
import torch
from damage import damaged
from fake_adapter_engine import FakeAdapterEngine
from fake_engine import FakeWorkerEngine, ask, attached, begin, load, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane import errors
from weightlane import messages as m
from weightlane.buckets import lay_out_buckets
from weightlane.errors import WeightlaneError
from weightlane.failures import Failure
from weightlane.packing import memory_of, pack_bucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.agent import WorkerAgent

TYPED = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, WeightlaneError)
}
REQUESTS: list[m.AgentRequest] = [
    m.Describe("fake"),
    m.GetResidency("fake", "lane-1"),
    m.Trace("fake", plan().tensors),
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
    begin(),
    *(load(bucket) for bucket in range(3)),
]


def whole_sync(number: int) -> list[m.AgentRequest]:
    return [
        m.Attach(plan()),
        begin(number),
        *(load(bucket, sync=number) for bucket in range(3)),
        m.FinishInline("lane-1", number),
        m.Publish("lane-1", number, 10),
    ]


def answer(agent: WorkerAgent, data: bytes, origin: str) -> m.AgentReply:
    """The reply to whatever bytes; a failure is known to be typed and to say who it comes from."""
    reply: m.AgentReply = m.decode(agent.handle(data), m.AgentReply, sender="the fake")
    if isinstance(reply, Failure):
        assert reply.error_type in TYPED, reply.traceback
        assert reply.origin == origin
    return reply


def some_request(known: Sequence[m.AgentRequest], random: Random) -> bytes:
    request = random.choice(known)
    return damaged(request, random) if random.random() < 0.6 else m.encode(request)


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_every_answer_is_typed_and_a_whole_sync_still_goes_through(seed: int) -> None:
    random = Random(seed)
    engine = FakeWorkerEngine()
    agent = attached(engine)
    for _ in range(12):
        written = len(engine.writes)
        answer(agent, some_request(REQUESTS, random), "worker 0 (FakeWorkerEngine)")
        if "publish" in engine.writes[written:]:
            assert agent.servable
        elif len(engine.writes) > written:
            assert not agent.servable
    for request in whole_sync(1):
        ask(agent, request)
    assert (agent.servable, agent.held_version) == (True, 10)


# -- an agent that holds an adapter's plan ------------------------------------------------------------------


def adapter_load(bucket: int, sync: int) -> m.LoadInline:
    return m.LoadInline("lane-1", sync, bucket, packed(adapters.plan(), bucket, adapters.values(sync)))


def packed(received: m.ReceivePlan, bucket: int, tensors: dict[str, Tensor]) -> bytes:
    layout, ordered = received.buckets[bucket], list(tensors.values())
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    pairs = [(entry.tensor, ordered[entry.tensor]) for entry in layout.entries]
    pack_bucket(memory, layout, received.tensors, pairs)
    return bytes(memory_of(memory))


def adapter_sync(number: int) -> list[m.AgentRequest]:
    """The tensors of sync n are those of version n, which is what it publishes."""
    return [
        m.BeginInline("lane-1", "p1", number, number, {0: "first"}, generation="goes-on"),
        *(adapter_load(bucket, number) for bucket in range(3)),
        m.FinishInline("lane-1", number),
        m.Publish("lane-1", number, number),
    ]


def full_sync() -> list[m.AgentRequest]:
    """A lane of full weights into the same worker: it writes the base under the adapter."""
    received = adapters.full_plan()
    assert received.buckets == lay_out_buckets(adapters.FULL)
    tensors = {wire.name: torch.ones(wire.shape) for wire in adapters.FULL}
    return [
        m.Attach(received),
        m.BeginInline("lane-2", "p1", 1, 7, {0: "first"}),
        m.LoadInline("lane-2", 1, 0, packed(received, 0, tensors)),
        m.FinishInline("lane-2", 1),
        m.Publish("lane-2", 1, 7),
    ]


ADAPTER_REQUESTS: list[m.AgentRequest] = [
    m.Describe("fake"),
    m.GetResidency("fake", "lane-1"),
    m.Trace("fake", adapters.plan().tensors),
    m.Attach(adapters.plan()),
    m.Attach(adapters.plan("paused")),
    m.Attach(adapters.plan(transport="shm", ring={0: "/nowhere"})),
    m.Receive("lane-1", "p1", 1, 1, {0: "first"}, 0.01, 0.01),
    m.CheckResidency("lane-1", "p1", {0: "first"}),
    m.ReceiveDisk("lane-1", "p1", 1, 1, {0: "first"}, "1", "0123456789abcdef"),
    m.Cancel("lane-1", 1, "because"),
    m.Detach("lane-1"),
    *adapter_sync(1),
    *adapter_sync(2),
    *full_sync(),
]


def requests_in_turn(random: Random) -> list[bytes]:
    """Whole syncs with damage among them: what is drawn at random alone hardly ever comes to a load."""
    found: list[bytes] = []
    number = 0
    for _ in range(random.randint(2, 4)):
        number += 1
        if random.random() < 0.2:
            requests, number = [*full_sync(), m.Attach(adapters.plan())], 0
        else:
            requests = adapter_sync(number)
            if random.random() < 0.3:  # given up once it is loaded
                requests.insert(-1, m.Cancel("lane-1", number, "because"))
        for request in requests:
            if random.random() < 0.2:
                found.append(some_request(ADAPTER_REQUESTS, random))
            elif random.random() < 0.05:
                found.append(damaged(request, random))
            found.append(m.encode(request))
    return found


def assert_nothing_torn(engine: FakeAdapterEngine) -> None:
    """What is served is held, and is all of the adapter."""
    if engine.serving:
        assert list(engine.served) == list(adapters.NAMES)


@settings(max_examples=80)
@given(st.integers(0, 1 << 32))
def test_an_adapter_is_served_whole_whatever_comes(seed: int) -> None:
    random = Random(seed)
    engine = FakeAdapterEngine()
    agent = adapters.attached(engine, adapters.plan(random.choice(["two_slot", "paused"])))
    for data in requests_in_turn(random):
        done = len(engine.calls)
        answer(agent, data, "worker 0 (FakeAdapterEngine)")
        now = engine.calls[done:]
        if "publish" in now or any(call.startswith("serve") for call in now):
            assert isinstance(m.decode(data, m.AgentRequest, sender="us"), m.Publish)
            assert agent.servable
        elif {"begin", "load_weights", "finish"} & set(now):
            assert not agent.servable
        assert_nothing_torn(engine)
        assert len(engine.slots) <= 2 or len({slot.rpartition(".")[0] for slot in engine.slots}) > 1
    for request in [*full_sync(), m.Attach(adapters.plan()), *adapter_sync(1)]:
        ask(agent, request)
    assert (agent.servable, agent.held_version, list(engine.slots)) == (True, 1, [engine.serving])
    assert all(torch.equal(engine.served[name], value) for name, value in adapters.values(1).items())


def test_those_requests_do_come_to_loading_serving_and_removing() -> None:
    # The control of the test above: with nothing but refusals, it would pass as well.
    seen: set[str] = set()
    for seed in range(20):
        engine = FakeAdapterEngine()
        agent = adapters.attached(engine)
        for data in requests_in_turn(Random(seed)):
            agent.handle(data)
        seen |= {call.partition(" ")[0] for call in engine.calls}
    assert seen == {"begin", "load_weights", "finish", "publish", "load", "serve", "remove"}


def test_no_request_is_left_out() -> None:
    every = set(typing.get_args(m.AgentRequest))
    assert {type(request) for request in REQUESTS} == every
    assert {type(request) for request in ADAPTER_REQUESTS} == every
