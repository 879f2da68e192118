"""One rank and one worker over any transport: real sinks, session and agent between two fakes."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from fake_device_memory import GPU, FakeGpu

from weightlane.agent import WorkerAgent
from weightlane.bounds import Bounds
from weightlane.buckets import lay_out_buckets
from weightlane.manifest import Manifest, TensorSpec
from weightlane.messages import ReceiveReport, WireTensor
from weightlane.moving import Mover, move_buckets
from weightlane.packing import dtype_name, memory_of
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, Program, RequestMove
from weightlane.receiver import ExpectedTensor, NameEntry, WorkerDescription
from weightlane.replica_session import ReplicaSession
from weightlane.ring_file import shared_memory_folder
from weightlane.transports import cuda_memory
from weightlane.transports.choice import controller_sink, make_ring
from weightlane.transports.disk import DiskSink
from weightlane.transports.disk_folder import LaneFolder
from weightlane.transports.disk_receivers import FolderReceivers
from weightlane.transports.sink import SinkBounds
from weightlane.types import Mode, Phase, TransportName
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from typing_extensions import Self

BUCKET_BYTES = 256
# The last is for an engine that has no agent and takes requests of its own.
WAYS = ("shm", "cuda_ipc", "inline", "inprocess", "disk", "request")
BY_AGENT = WAYS[:5]
SECONDS = 20.0

Arrived = tuple[str, str, tuple[int, ...], bytes]


def described(name: str, tensor: Tensor) -> Arrived:
    """Everything that must be the same at both ends."""
    return name, dtype_name(tensor.dtype), tuple(tensor.shape), bytes(memory_of(tensor.contiguous()))


@dataclass
class FakeReceiver:
    """A worker's engine, and an engine that takes requests: copies what it is handed and notes each call."""

    tensors: dict[str, Tensor]
    stream: FakeStream
    calls: list[str] = field(default_factory=list)
    held: dict[str, Tensor] = field(default_factory=dict)
    arrived: list[Arrived] = field(default_factory=list)
    # For each load: the names in it, and how many buckets the trainer had been asked for by then.
    loads: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    fails_at_load: int = -1

    def describe(self) -> WorkerDescription:
        expected = tuple(ExpectedTensor(name, tuple(t.shape)) for name, t in self.tensors.items())
        return WorkerDescription(0, 1, "here", os.getpid(), "i", expected=expected)

    def current_incarnation(self) -> str:
        return self.describe().incarnation

    def check_plan(self, plan: object) -> list[Any]:
        return []

    def begin(self, version: int) -> None:
        self.calls.append(f"begin {version}")

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        if len(self.loads) == self.fails_at_load:
            raise KeyError("lm_head.weight is not here")
        self.calls.append("load")
        self.loads.append((tuple(name for name, _ in tensors), self.stream.asked))
        self.arrived += [described(name, tensor) for name, tensor in tensors]
        self.keep(tensors)
        return len(tensors)

    def keep(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.held.update((name, tensor.clone()) for name, tensor in tensors)

    def finish(self, version: int) -> None:
        self.calls.append(f"finish {version}")

    def publish(self, version: int) -> None:
        self.calls.append(f"publish {version}")


class FakeStream:
    """Yields the planned buckets, as a trainer plugin's stream does, and counts."""

    collective = False
    owns_storage = False
    device = "cpu"

    def __init__(self, tensors: dict[str, Tensor], plan: LanePlan) -> None:
        self.values = list(tensors.values())
        self.plan = plan
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        for layout in self.plan.buckets:
            self.asked += 1
            yield [(entry.tensor, self.values[entry.tensor]) for entry in layout.entries]


class FakeEndpoint:
    """Reaches an agent of this process, or an engine that takes requests."""

    address = "here"

    def __init__(self, receiver: FakeReceiver) -> None:
        self.receiver = receiver
        self.agent = WorkerAgent(lambda backend: receiver, origin="worker 0 (FakeReceiver)")
        self.lasts: list[bool] = []

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        return [self.agent.handle(message)]

    def local_agent(self) -> WorkerAgent:
        return self.agent

    def send_bucket(self, move: object, tensors: Any, *, last: bool, version: int) -> None:
        self.lasts.append(last)
        if tensors:
            self.receiver.load_weights(tensors)

    def call(self, call: object, *, version: int | None = None) -> str:
        return ""

    def close(self) -> None: ...


def plan_of(tensors: dict[str, Tensor], way: str) -> LanePlan:
    wires = tuple(WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())
    request = RequestMove("/update", "payload", 1, "{}", "{}")
    transport = TransportName.INLINE if way == "request" else TransportName(way)
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
        gpus=(GPU,) if way == "cuda_ipc" else (),
        program=Program(request if way == "request" else AgentMove(transport.value)),
    )
    specs = tuple(TensorSpec(wire.name, wire.shape, wire.dtype) for wire in wires)
    return LanePlan(
        lane="lane-1",
        mode=Mode.FULL,
        phase=Phase.FULL,
        world_size=1,
        trainer_backend="torch",
        manifest=Manifest(Phase.FULL, 1, specs),
        verify="digest",
        entries=tuple(NameEntry(wire.name, wire.name, wire.dtype) for wire in wires),
        tensors=wires,
        buckets=lay_out_buckets(wires, bucket_bytes=BUCKET_BYTES),
        replicas=(replica,),
    )


class Rig:
    """What one lane of one rank and one worker holds, attached."""

    def __init__(self, tensors: dict[str, Tensor], way: str, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.plan = plan_of(tensors, way)
        self.stream = FakeStream(tensors, self.plan)
        self.receiver = FakeReceiver(tensors, self.stream)
        self.endpoint = FakeEndpoint(self.receiver)
        endpoint: Any = self.endpoint
        self.session = ReplicaSession(self.plan, 0, endpoint, Bounds(bucket=SECONDS, lost_after=SECONDS))
        self.parent: tempfile.TemporaryDirectory[str] | None = None
        folder = None
        if way == "disk":
            # In memory, where `fsync` costs nothing.
            self.parent = tempfile.TemporaryDirectory(dir=shared_memory_folder())
            folder = LaneFolder(self.plan.lane, self.parent.name)
        receivers = FolderReceivers(self.plan, (self.session,))
        sink: Any = DiskSink(self.plan, folder, receivers) if folder else None
        sink = sink or controller_sink(self.plan, 0, endpoint)
        self.ring = None if sink else make_ring(self.plan, replica=0, worker=0)
        self.sink: Any = sink or self.ring
        self.session.attach([self.ring.place] if self.ring else [], folder.path if folder else "")

    def move(self, sync: int, version: int) -> str:
        """Begins, moves all buckets, and gives the digest of what was sent."""

        class FakeRegistry:
            call_export_params = staticmethod(lambda *_: self.stream)

        nothing: Any = None
        registry: Any = FakeRegistry()
        self.session.begin(sync, version, lambda error: None)
        mover = Mover(registry, nothing, nothing, (self.sink,), (), nothing)
        bounds = SinkBounds(SECONDS, SECONDS, nothing_to_check)
        with mover.open_stream() as stream:
            return move_buckets(mover, stream, self.plan, sync, version, bounds, lambda nbytes: None).digest

    def reports(self, sync: int) -> list[ReceiveReport]:
        return self.session.reports(sync, nothing_to_check)

    def close(self) -> None:
        self.session.close()
        self.sink.close()
        if self.parent:
            self.parent.cleanup()


@contextmanager
def rig_of(tensors: dict[str, Tensor], way: str) -> Iterator[Rig]:
    gpu = FakeGpu()
    with mock.patch.object(cuda_memory, "CudaMemories", return_value=gpu):
        rig = Rig(tensors, way, gpu)
        try:
            yield rig
        finally:
            rig.close()
