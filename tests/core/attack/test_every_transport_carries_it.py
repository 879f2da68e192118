"""By ring, by value, by reference and in requests: large tensors, odd lengths, and an end in any case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_engine import FakeWorkerEngine, agent_of_fake, ask, begin, plan
from torch import Tensor

from weightlane.buckets import BucketLayout, lay_out_buckets, slot_sizes
from weightlane.messages import Attach, Detach, FinishInline, LoadInline, Receive, WireTensor
from weightlane.packing import WireDigest, dtype_name, memory_of, pack_bucket
from weightlane.program import RequestMove
from weightlane.receiver import ExpectedTensor, WorkerDescription
from weightlane.ring import RingWriter
from weightlane.transports.inline import RequestSink
from weightlane.transports.sink import SinkBounds
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Sequence

TRANSPORTS = ("ring", "by value", "by reference", "requests")
BOUNDS = {"seconds": 30.0, "lost_after": 30.0}


class FakeEngineOf(FakeWorkerEngine):
    """Expects the tensors that it is made with."""

    def __init__(self, wires: Sequence[WireTensor]) -> None:
        super().__init__()
        self.wires = wires

    def describe(self) -> WorkerDescription:
        expected = tuple(ExpectedTensor(wire.name, wire.shape) for wire in self.wires)
        return WorkerDescription(0, 1, "here", 1, "first", expected=expected)


@dataclass
class FakeRequestEndpoint:
    """Copies what an engine's own request would carry."""

    held: dict[str, Tensor] = field(default_factory=dict)
    last: list[bool] = field(default_factory=list)

    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        self.held.update((name, tensor.clone()) for name, tensor in tensors)
        self.last.append(last)


@dataclass
class FakePlan:
    """What a request sink reads of a lane's plan."""

    tensors: tuple[WireTensor, ...]
    verify: str = "digest"


@dataclass
class Delivered:
    held: dict[str, Tensor]
    sent_digest: str
    received_digest: str
    finished: int


def deliver(transport: str, tensors: dict[str, Tensor], buckets: Sequence[BucketLayout]) -> Delivered:
    wires = tuple(WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())
    values = list(tensors.values())

    def numbered(layout: BucketLayout) -> list[tuple[int, Tensor]]:
        return [(entry.tensor, values[entry.tensor]) for entry in layout.entries]

    if transport == "requests":
        endpoint: Any = FakeRequestEndpoint()
        move = RequestMove("/update", "tensors", 1, "{}", "{}")
        lane_plan: Any = FakePlan(wires)
        sink = RequestSink(lane_plan, move, endpoint)
        sink.begin(1, 10, SinkBounds(30.0, 30.0, nothing_to_check))
        for layout in buckets:
            sink.put(layout, numbered(layout))
        assert endpoint.last == [False] * (len(buckets) - 1) + [True]
        digest = sink.finish()
        return Delivered(endpoint.held, digest, digest, endpoint.last.count(True))

    engine = FakeEngineOf(wires)
    agent = agent_of_fake(engine)
    sent = WireDigest(wires)
    fields: dict[str, Any] = {"tensors": wires, "buckets": tuple(buckets)}
    if transport == "ring":
        writer = RingWriter(label="attack", slot_sizes=slot_sizes(buckets), peer="worker 0")
        try:
            ask(agent, Attach(plan(transport="shm", ring={0: str(writer.path)}, **fields)))
            with ThreadPoolExecutor(1) as worker:
                receive = Receive("lane-1", "p1", 1, 10, {0: "first"}, 30.0, 30.0)
                answer = worker.submit(ask, agent, receive)
                writer.begin(1)
                for layout in buckets:
                    slot = writer.acquire(layout, sync=1, check=nothing_to_check, **BOUNDS)
                    pack_bucket(slot, layout, wires, numbered(layout))
                    sent.update(writer.slot_memory(layout), layout)
                    writer.post(layout, sync=1)
                report = answer.result(30.0)
            ask(agent, Detach("lane-1"))
        finally:
            writer.close()
        return Delivered(engine.held, sent.hexdigest(), report.digest, engine.calls.count("finish"))
    ask(agent, Attach(plan(**fields)))
    ask(agent, begin())
    for layout in buckets:
        bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
        pack_bucket(bucket, layout, wires, numbered(layout))
        sent.update(memory_of(bucket), layout)
        if transport == "by value":
            ask(agent, LoadInline("lane-1", 1, layout.index, bytes(memory_of(bucket))))
        else:
            named = [(wires[number].name, tensor) for number, tensor in numbered(layout)]
            agent.load_by_reference("lane-1", 1, layout.index, named)
    report = ask(agent, FinishInline("lane-1", 1))
    # By reference nothing travels, so nothing is digested.
    received = sent.hexdigest() if transport == "by reference" else report.digest
    return Delivered(engine.held, sent.hexdigest(), received, engine.calls.count("finish"))


def assert_delivered(delivered: Delivered, tensors: dict[str, Tensor]) -> None:
    assert list(delivered.held) == list(tensors)
    for name, tensor in tensors.items():
        got = delivered.held[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert bytes(memory_of(got.contiguous())) == bytes(memory_of(tensor.contiguous()))
    assert delivered.sent_digest == delivered.received_digest
    assert delivered.finished == 1


@pytest.mark.requirement("R60")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tensor_above_the_bucket(transport: str) -> None:
    tensors = {
        "small": torch.arange(3.0),
        "large": torch.arange(1000, dtype=torch.int64),
        "larger": torch.arange(3000, dtype=torch.int16),
        "end": torch.tensor(True),
    }
    wires = [WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()]
    buckets = lay_out_buckets(wires, bucket_bytes=128)
    assert [layout.nbytes for layout in buckets] == [64, 8000, 6016, 64]
    assert_delivered(deliver(transport, tensors, buckets), tensors)


@pytest.mark.requirement("R59")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_empty_last_bucket_still_ends_the_sync(transport: str, count: int) -> None:
    tensors = {str(number): torch.full((20,), float(number)) for number in range(count)}
    wires = [WireTensor(name, (20,), "float32") for name in tensors]
    filled = lay_out_buckets(wires, bucket_bytes=128) if count else ()
    buckets = [BucketLayout(item.index, item.slot, item.nbytes, item.entries) for item in filled]
    buckets.append(BucketLayout(len(buckets), 0, 0, (), last=True))
    assert_delivered(deliver(transport, tensors, buckets), tensors)


@pytest.mark.requirement("R62")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_odd_lengths_before_wider_dtypes(transport: str) -> None:
    tensors = {f"h{number}": torch.full((1,), float(number), dtype=torch.float16) for number in range(3)}
    tensors |= {"wide": torch.arange(2.0), "odd": torch.ones(3, dtype=torch.uint8), "wider": torch.arange(3)}
    wires = [WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()]
    assert_delivered(deliver(transport, tensors, lay_out_buckets(wires)), tensors)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_that_are_not_contiguous(transport: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"transposed": base.t(), "strided": base[::2, 1:4], "expanded": base[:1].expand(5, 6)}
    tensors["overlapping"] = base.as_strided((3, 3), (1, 1))
    wires = [WireTensor(name, tuple(t.shape), "float32") for name, t in tensors.items()]
    assert_delivered(deliver(transport, tensors, lay_out_buckets(wires)), tensors)
