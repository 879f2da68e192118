"""One rank's data path: what a failing sink means for the ranks beside it and the workers behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from weightlane.buckets import lay_out_buckets
from weightlane.errors import ExportError, SyncError
from weightlane.manifest import Manifest
from weightlane.messages import AgentRequest, BeginInline, Done, WireTensor, decode, encode
from weightlane.moving import Mover, move_buckets
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, Program, RequestMove
from weightlane.transports.inline import AgentInlineSink, RequestSink
from weightlane.transports.inprocess import InprocessSink
from weightlane.transports.sink import SinkBounds
from weightlane.types import Mode, Phase, TransportName
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from typing_extensions import Self

WIRES = tuple(WireTensor(name, (40,), "float32") for name in "abc")
BUCKETS = lay_out_buckets(WIRES, bucket_bytes=192)
BOUNDS = SinkBounds(5.0, 5.0, nothing_to_check)
MOVE = RequestMove("/update", "payload", 1, "{}", "{}")


def plan(transport: TransportName = TransportName.INLINE, move: Any = None) -> LanePlan:
    program = Program(move or AgentMove(transport.value))
    replica = ReplicaPlan(
        replica=0,
        engine="acme",
        engine_version="1",
        address="here",
        backend="acme",
        era="now",
        distribution="acme 1",
        evidence=(),
        notes=(),
        coverage="untraced",
        transport=transport,
        incarnations={0: "i"},
        peers=(0,),
        program=program,
    )
    return LanePlan(
        lane="lane-1",
        mode=Mode.FULL,
        phase=Phase.FULL,
        world_size=2,
        trainer_backend="torch",
        manifest=Manifest(Phase.FULL, 2, ()),
        verify="digest",
        entries=(),
        tensors=WIRES,
        buckets=BUCKETS,
        replicas=(replica,),
    )


class FakeStream:
    owns_storage = False
    device = "cpu"

    def __init__(self, *, collective: bool) -> None:
        self.collective = collective
        self.asked = 0
        self.exits = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exits += 1

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        for layout in BUCKETS:
            self.asked += 1
            yield [(entry.tensor, torch.full((40,), float(entry.tensor))) for entry in layout.entries]


class FakeRegistry:
    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream

    def call_export_params(self, *_: object) -> FakeStream:
        return self._stream


class FakeSink:
    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.calls: list[str] = []
        self.aborted: list[tuple[str, int | None]] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise SyncError(f"it failed at {call}")

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:
        self._note("begin")

    def put(self, layout: Any, tensors: Any) -> None:
        self._note(f"put {layout.index}")

    def finish(self) -> str:
        self._note("finish")
        return "digest"

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        self.aborted.append((cause, sync))

    def close(self) -> None:
        self._note("close")


def move(stream: FakeStream, *sinks: FakeSink, bounds: SinkBounds = BOUNDS) -> str:
    registry: Any = FakeRegistry(stream)
    nothing: Any = None
    mover = Mover(registry, nothing, nothing, sinks, (), nothing)
    with mover.open_stream() as opened:
        outcome = move_buckets(mover, opened, plan(), 4, 10, bounds, lambda nbytes: None)
    if outcome.failure is not None:
        assert stream.collective, "without a collective a failure is raised at once"
        raise outcome.failure
    return outcome.digest


def test_every_bucket_goes_to_every_sink_in_order() -> None:
    stream, sinks = FakeStream(collective=False), (FakeSink(), FakeSink())
    assert len(BUCKETS) == 3
    assert move(stream, *sinks) == "digest"
    for sink in sinks:
        assert sink.calls == ["begin", "put 0", "put 1", "put 2", "finish"]
        assert sink.aborted == []
    assert stream.exits == 1


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("fails_at", ["begin", "put 0", "put 1", "put 2"])
def test_in_a_collective_a_failed_rank_drains_to_the_end_and_tells_its_workers_at_once(fails_at: str) -> None:
    stream, bad, good = FakeStream(collective=True), FakeSink(fails_at), FakeSink()
    with pytest.raises(SyncError, match=f"it failed at {fails_at}"):
        move(stream, good, bad)
    assert (stream.asked, stream.exits) == (3, 1)
    assert bad.calls[-1] == fails_at
    for sink in (bad, good):
        assert sink.aborted == [(f"it failed at {fails_at}", 4)]
        assert "finish" not in sink.calls


@pytest.mark.parametrize("fails_at", ["begin", "put 1", "finish"])
def test_without_a_collective_it_stops_at_once(fails_at: str) -> None:
    stream = FakeStream(collective=False)
    with pytest.raises(SyncError, match=f"it failed at {fails_at}"):
        move(stream, FakeSink(fails_at))
    assert stream.asked == {"begin": 0, "put 1": 2, "finish": 3}[fails_at]
    assert stream.exits == 1


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(("collective", "asked"), [(True, 3), (False, 1)])
def test_a_rank_that_only_drains_sees_an_abort(collective: bool, asked: int) -> None:
    def check() -> None:
        raise SyncError("another rank failed")

    stream = FakeStream(collective=collective)
    with pytest.raises(SyncError, match="another rank failed"):
        move(stream, bounds=SinkBounds(5.0, 5.0, check))
    assert stream.asked == asked


@pytest.mark.parametrize("kind", ["agent", "request", "inprocess"])
def test_a_rank_sees_an_abort_between_buckets_whatever_its_sink_looks_at(kind: str) -> None:
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 1:
            raise SyncError("another rank failed")

    stream = FakeStream(collective=False)
    _, sink = make_sink(kind)
    with pytest.raises(SyncError, match="another rank failed"):
        move(stream, sink, bounds=SinkBounds(5.0, 5.0, check))
    assert stream.asked <= 2


def test_a_rank_that_only_drains_has_no_digest() -> None:
    assert move(FakeStream(collective=True)) == ""


# -- sinks that go through the endpoint ---------------------------------------------------------------------


class FakeAgent:
    def __init__(self) -> None:
        self.loaded: list[tuple[str, Tensor]] = []

    def load_by_reference(self, lane: str, sync: int, bucket: int, tensors: list[tuple[str, Tensor]]) -> None:
        self.loaded += tensors


class FakeEndpoint:
    address = "here"

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.agent = FakeAgent()
        self.sent: list[tuple[str, Tensor]] = []

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        self.requests.append(decode(message, AgentRequest, sender="the sink"))
        return [encode(Done(0))]

    def local_agent(self) -> FakeAgent:
        return self.agent

    def send_bucket(self, move: Any, tensors: Any, *, last: bool, version: int) -> None:
        self.sent += tensors


def make_sink(kind: str) -> tuple[Any, Any]:
    endpoint: Any = FakeEndpoint()
    if kind == "request":
        return endpoint, RequestSink(plan(move=MOVE), MOVE, endpoint)
    if kind == "agent":
        return endpoint, AgentInlineSink(plan(), plan().replicas[0], endpoint)
    local = plan(TransportName.INPROCESS)
    return endpoint, InprocessSink(local, local.replicas[0], endpoint)


@pytest.mark.parametrize("kind", ["agent", "request", "inprocess"])
def test_another_shape_or_another_tensor_is_refused_before_it_is_sent(kind: str) -> None:
    endpoint, sink = make_sink(kind)
    sink.begin(1, 10, BOUNDS)
    for wrong in ([(0, torch.zeros(1, 40))], [(1, torch.zeros(40))], []):
        with pytest.raises(ExportError, match="Connect again"):
            sink.put(BUCKETS[0], wrong)
    assert (endpoint.sent, endpoint.agent.loaded) == ([], [])
    assert all(isinstance(request, BeginInline) for request in endpoint.requests)
    sink.put(BUCKETS[0], [(0, torch.zeros(40))])
    sink.abort("late", sync=1)
    sink.close()


def test_by_value_and_by_request_the_digests_are_the_same() -> None:
    digests = set()
    for kind in ("agent", "request"):
        _, sink = make_sink(kind)
        sink.begin(1, 10, BOUNDS)
        for layout in BUCKETS:
            sink.put(layout, [(entry.tensor, torch.full((40,), 2.0).double()) for entry in layout.entries])
        digests.add(sink.finish())
    assert len(digests) == 1
    assert "" not in digests


def test_what_is_sent_by_value_does_not_alias_the_trainers_tensor() -> None:
    endpoint, sink = make_sink("agent")
    sink.begin(1, 10, BOUNDS)
    live = torch.zeros(40)
    sink.put(BUCKETS[0], [(0, live)])
    before = endpoint.requests[-1].payload
    live.fill_(1)
    sink.put(replace(BUCKETS[1]), [(1, live)])
    assert before == bytes(192)
