"""Both ends of transport `disk` around a worker engine that is a dictionary: everything else is real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_engine import WEIGHTS, WIRES, FakeWorkerEngine, agent_of_fake, ask

from weightlane.buckets import lay_out_buckets
from weightlane.manifest import Manifest, TensorSpec
from weightlane.messages import Attach, Publish, ReceiveDisk, ReceiveReport
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, Program
from weightlane.receiver import NameEntry
from weightlane.transports.disk import DiskSink, WrittenVersion
from weightlane.transports.disk_folder import LaneFolder
from weightlane.transports.sink import SinkBounds
from weightlane.types import Mode, Phase, TransportName
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from torch import Tensor

BOUNDS = SinkBounds(20.0, 5.0, nothing_to_check)


def lane_plan(**fields: Any) -> LanePlan:
    """Three tensors, one a bucket; the receiver knows `c` under another name than the checkpoint's."""
    replica = ReplicaPlan(
        replica=0,
        engine="fake",
        engine_version="1",
        address="here",
        backend="fake",
        era="now",
        distribution="fake 1",
        evidence=(),
        notes=(),
        coverage="untraced",
        transport=TransportName.DISK,
        incarnations={0: "first"},
        peers=(0,),
        program=Program(AgentMove("disk")),
    )
    specs = tuple(TensorSpec(f"model.{wire.name}", wire.shape, wire.dtype, (0,)) for wire in WIRES)
    entries = tuple(
        NameEntry(spec.name, wire.name, wire.dtype, rule="exact")
        for spec, wire in zip(specs, WIRES, strict=True)
    )
    return LanePlan(
        **{
            "lane": "lane-1",
            "mode": Mode.FULL,
            "phase": Phase.FULL,
            "world_size": 1,
            "trainer_backend": "torch",
            "manifest": Manifest(Phase.FULL, 1, specs),
            "verify": "digest",
            "entries": entries,
            "tensors": WIRES,
            "buckets": lay_out_buckets(WIRES, bucket_bytes=64),
            "replicas": (replica,),
        }
        | fields
    )


class DiskLane:
    """A plan, its sink, and an agent that holds the plan."""

    def __init__(self, parent: str, **fields: Any) -> None:
        self.plan = lane_plan(**fields)
        self.folder = LaneFolder(self.plan.lane, parent)
        self.written: list[WrittenVersion] = []
        self.sink = DiskSink(self.plan, self.folder, [self.written.append])
        self.engine = FakeWorkerEngine(prefix="model.")
        self.agent = agent_of_fake(self.engine)
        ask(self.agent, Attach(self.plan.receive_plan(0, (), self.folder.path)))
        self.engine.calls.clear()

    def write(
        self,
        sync: int = 1,
        version: int = 10,
        weights: dict[str, Tensor] = WEIGHTS,
        bounds: SinkBounds = BOUNDS,
    ) -> str:
        self.sink.begin(sync, version, bounds)
        values = list(weights.values())
        for layout in self.plan.buckets:
            self.sink.put(layout, [(entry.tensor, values[entry.tensor]) for entry in layout.entries])
        return self.sink.finish()

    def request(self, **fields: Any) -> ReceiveDisk:
        written = self.written[-1]
        return ReceiveDisk(
            **{
                "lane": self.plan.lane,
                "plan_digest": self.plan.digest(),
                "sync": written.sync,
                "version": written.version,
                "incarnation": {0: "first"},
                "folder": written.folder,
                "manifest_digest": written.manifest_digest,
            }
            | fields
        )

    def load(self, **fields: Any) -> ReceiveReport:
        report: ReceiveReport = ask(self.agent, self.request(**fields))
        return report

    def publish(self) -> None:
        written = self.written[-1]
        ask(self.agent, Publish(self.plan.lane, written.sync, written.version))
        self.sink.published(written.sync)

    @property
    def home(self) -> Path:
        """The lane's folder."""
        return Path(self.folder.path)

    @property
    def latest(self) -> Path:
        """The folder of the version written last."""
        return self.home / self.written[-1].folder

    def versions(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir())
