"""The plan of a lane: everything decided at connect, shown to people and replayed at every sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from weightlane.adapters import AdapterExpression, AdapterPlan, GenerationDuringSync, TrainedBase
from weightlane.buckets import BucketLayout
from weightlane.lane_owner import this_process
from weightlane.manifest import Manifest
from weightlane.messages import ReceivePlan, WireTensor
from weightlane.program import AgentMove, Program, TrainerLifecycle
from weightlane.receiver import NameEntry
from weightlane.schedule import Schedule, make_schedule
from weightlane.trace.figures import TraceFigures
from weightlane.types import (
    Coverage,
    MemoryTag,
    MissingPolicy,
    Mode,
    Phase,
    ReadBackPolicy,
    TransportName,
    VerifyLevel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.lane_messages import RingPlace
    from weightlane.peft import AdapterConfig

FENCED = "are fenced until a sync succeeds"
"""What becomes of receivers that a sync had begun to write, as a predicate for messages."""


class ReplicaPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica: which backend serves it, why, and who feeds its workers.

    `peers[i]` is the trainer rank that feeds worker i. `evidence` and `notes` are what selection saw.
    `adapter` is how this engine takes the manifest's adapter, in phase ADAPTER.
    `stamps_version`: the engine marks what it generates with the version that made it. `coverage_reason` says
    why coverage is not proven, `trace` what was seen where it is,
    `reads_back` whether requests, and no agent, tell what it holds. `gpus` has, over `cuda_ipc`, the UUID of
    each worker's GPU, which its peer is on too.
    """

    replica: int
    engine: str
    engine_version: str
    address: str
    backend: str
    era: str
    distribution: str
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    coverage: Coverage
    transport: TransportName
    incarnations: dict[int, str]
    peers: tuple[int, ...]
    program: Program
    adapter: AdapterExpression | None = None
    stamps_version: bool = False
    coverage_reason: str = ""
    trace: TraceFigures | None = None
    reads_back: bool = False
    gpus: tuple[str, ...] = ()

    @property
    def generation(self) -> GenerationDuringSync:
        """What a front does with generation during a sync."""
        if self.adapter is not None and self.adapter.generation == "goes-on":
            return "goes-on"
        return "engine-held" if self.program.requests and self.program.pause else "held"

    @property
    def decided(self) -> ReplicaPlan:
        """Without what may differ when the same is decided again: incarnations, and how long a trace took."""
        trace = self.trace.timeless if self.trace else None
        return msgspec.structs.replace(self, incarnations={}, trace=trace)

    @property
    def coverage_told(self) -> str:
        """Coverage in words: `proven` with the figures of the trace, else with why it is not."""
        more = str(self.trace) if self.trace else self.coverage_reason
        return f"{self.coverage}: {more}" if more else self.coverage

    @property
    def has_agent(self) -> bool:
        """Whether our code runs in the workers, so that counts and digests come back."""
        return isinstance(self.program.move, AgentMove)


class LanePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole plan, equal on every rank.

    `folder` is where transport `disk` writes, as the user named it ("": a private temporary folder).
    `trained_on` is there in phases ADAPTER and BASE. `base` is the plan of phase BASE beside one of phase
    ADAPTER, to be shown with it: it is agreed, digested and attached by itself.
    """

    lane: str
    mode: Mode
    phase: Phase
    world_size: int
    trainer_backend: str
    manifest: Manifest
    verify: VerifyLevel
    entries: tuple[NameEntry, ...]
    tensors: tuple[WireTensor, ...]
    buckets: tuple[BucketLayout, ...]
    replicas: tuple[ReplicaPlan, ...]
    folder: str = ""
    missing_replicas: MissingPolicy = "fail"
    release: tuple[MemoryTag, ...] = ()
    trainer_lifecycle: TrainerLifecycle = TrainerLifecycle()
    read_back: ReadBackPolicy = "first"
    trained_on: TrainedBase | None = None
    base: LanePlan | None = None

    def digest(self) -> str:
        """Sixteen hex digits; sender and receiver compare them before each sync.

        Incarnations are left out: they are residency, which each sync asks for, and not what was decided at
        connect. A replica that comes back thus leaves the plans that the others hold as they are.
        """
        decided = tuple(replica.decided for replica in self.replicas)
        return xxhash.xxh3_64_hexdigest(
            msgspec.msgpack.encode(msgspec.structs.replace(self, replicas=decided, base=None))
        )

    @property
    def sends_base(self) -> bool:
        """Whether the base comes from here as well, to whoever does not hold it."""
        return self.phase is Phase.ADAPTER and self.trained_on is not None and bool(self.trained_on.sent_by)

    @property
    def nbytes(self) -> int:
        """Bytes that one replica receives in one sync."""
        return sum(entry.nbytes for layout in self.buckets for entry in layout.entries)

    @property
    def dropped(self) -> tuple[NameEntry, ...]:
        """Exported tensors that are not sent, each with its reason."""
        return tuple(entry for entry in self.entries if entry.dropped)

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Canonical names of the tensors that travel, in the order of `tensors`."""
        return tuple(entry.canonical for entry in self.entries if not entry.dropped)

    @property
    def over_disk(self) -> bool:
        """Whether a replica is fed through a folder."""
        return any(replica.transport is TransportName.DISK for replica in self.replicas)

    @property
    def bucket_waits(self) -> int:
        """How many buckets one sync waits for; over disk each is written, then read."""
        return len(self.buckets) * (2 if self.over_disk else 1)

    @property
    def serving_ranks(self) -> tuple[int, ...]:
        """Ranks that send; all others only drain."""
        return tuple(sorted({peer for replica in self.replicas for peer in replica.peers}))

    @property
    def schedule(self) -> Schedule:
        """Every step of one sync, of both sides, in the order in which the lane takes them."""
        return make_schedule(
            [replica.program for replica in self.replicas],
            self.trainer_lifecycle,
            {replica.replica: self.read_back for replica in self.replicas if replica.reads_back},
        )

    @property
    def receivers_in_failure(self) -> str:
        """What becomes of receivers when a sync fails, as a predicate for messages."""
        if self.replicas and all(replica.generation == "goes-on" for replica in self.replicas):
            return "serve the adapter that they served before"
        return FENCED

    def receive_plan(self, replica: int, rings: Sequence[RingPlace], folder: str = "") -> ReceivePlan:
        """What the workers of one replica need; made by the controller, whose process it names.

        `rings` are this replica's, one a worker (transports `shm` and `cuda_ipc`), `folder` is the lane's
        (transport `disk`).
        """
        chosen = self.replicas[replica]
        by_reference = chosen.transport is TransportName.INPROCESS
        config, expression, trained = self.manifest.adapter, chosen.adapter, self.trained_on
        return ReceivePlan(
            lane=self.lane,
            plan_digest=self.digest(),
            backend=chosen.backend,
            transport=chosen.transport.value,
            tensors=self.tensors,
            buckets=self.buckets,
            ring={place.worker: place.path for place in rings},
            memory={place.worker: place.memory for place in rings if place.memory is not None},
            verify="counts" if by_reference else self.verify,
            folder=folder if chosen.transport is TransportName.DISK else "",
            phase=self.phase,
            adapter=AdapterPlan(config, expression, trained) if config and expression and trained else None,
            base=trained if self.phase is Phase.BASE else None,
            owner=this_process(),
            canonical={
                entry.wire: entry.canonical
                for entry in self.entries
                if not entry.dropped and entry.wire != entry.canonical
            },
            tables=dict(enumerate(chosen.trace.digests)) if chosen.trace else {},
            read_back=self.read_back,
        )

    def __str__(self) -> str:
        part = f"{self.mode.value}, phase base" if self.phase is Phase.BASE else self.mode.value
        head = (
            f"lane {self.lane}: {part} from {self.trainer_backend} on {self.world_size} "
            f"rank{_s(self.world_size)}, {len(self.tensors)} tensors, {self.nbytes / 1e6:.1f} MB in "
            f"{len(self.buckets)} bucket{_s(len(self.buckets))}, verify {self.verify}, "
            f"read back: {self.read_back}, missing replicas: {self.missing_replicas}, "
            f"memory released: {', '.join(self.release) or 'none'}"
        )
        lines = [head]
        if self.manifest.adapter:
            config = self.manifest.adapter
            lines.append(
                f"  adapter {config.name}: rank {config.rank}, scale {config.scaling:g}, "
                f"{len(config.target_modules)} modules{_own_words(config)}"
            )
        if self.trained_on and self.phase is Phase.ADAPTER:
            lines.append(f"  base {_base_told(self.trained_on)}")
        for replica in self.replicas:
            feeds = ", ".join(f"rank {peer} -> worker {worker}" for worker, peer in enumerate(replica.peers))
            lines.append(
                f"  replica {replica.replica}: {replica.engine} {replica.engine_version} at {replica.address}"
            )
            lines.append(f"    backend {replica.backend} ({replica.distribution}), era {replica.era}")
            lines.extend(f"    evidence: {line}" for line in replica.evidence)
            lines.append(f"    transport {replica.transport.value}: {feeds}")
            lines.append(f"    coverage {replica.coverage_told}")
            if replica.transport is TransportName.DISK:
                folder = self.folder or "a new private temporary folder of rank 0, removed at close"
                lines.append(f"    folder: {folder}")
            if replica.adapter:
                lines.append(f"    adapter swap {replica.adapter.swap}, form {replica.adapter.form}")
            if replica.program.requests:
                lines.append(f"    requests that run: {replica.program.requests}")
            if not replica.stamps_version:
                lines.append("    note: samples carry no weight version: nobody can tell how old one is")
            notes = replica.notes + replica.program.notes + (replica.adapter.notes if replica.adapter else ())
            lines.extend(f"    note: {line}" for line in notes)
        lines.append("  schedule of a sync:")
        lines.extend(f"    {line}" for line in str(self.schedule).splitlines())
        lines.extend(f"  trainer note: {line}" for line in self.trainer_lifecycle.notes)
        lines.extend(f"  dropped {entry.canonical}: {entry.dropped}" for entry in self.dropped)
        if self.base:
            lines.append("  before it, to each replica that does not hold the base:")
            lines.extend(f"  {line}" for line in str(self.base).splitlines())
        return "\n".join(lines)


def _own_words(config: AdapterConfig) -> str:
    return f", {len(config.own)} of them with a rank or scale of their own" if config.own else ""


def _base_told(base: TrainedBase) -> str:
    known = f"{len(base.values)} tensors known by value" if base.values else "known to this lane alone"
    if base.sent_by:
        return f"{base.identity}, {known}: sent to whoever does not hold it, asked before each sync"
    return f"{base.identity}, {known}: must be held already, since {base.not_sent}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def wire_tensors(
    entries: tuple[NameEntry, ...], shapes: dict[str, tuple[int, ...]]
) -> tuple[WireTensor, ...]:
    """The tensors that travel, in manifest order: everything that is not dropped."""
    return tuple(
        WireTensor(entry.wire, shapes[entry.canonical], entry.dtype) for entry in entries if not entry.dropped
    )
