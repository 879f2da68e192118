"""The agent inside an engine worker: answers typed messages, reads the ring, loads, counts, digests.

The engine-specific part is a `WorkerEngine` from the plugin; everything here is the same for every engine.
`handle` never raises: an error becomes a `Failure` that names this worker and its plugin.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from weightlane.adapter_collector import AdapterCollector
from weightlane.adapter_swap import AdapterSwap, replaces_in_place
from weightlane.agent_admission import require_plan, require_residency
from weightlane.agent_receive import bucket_by_value, open_ring, require_disk, require_folder, require_ring
from weightlane.agent_state import Attached, BaseState, OpenSync, require_open
from weightlane.agent_trace import KeptTables, read_back
from weightlane.agent_turns import Turns
from weightlane.attach_check import attach_problems, base_identity
from weightlane.engine_agent import released_by, why_not_whole
from weightlane.errors import NotServableError, PlanError, SyncError
from weightlane.failures import failure_of
from weightlane.messages import (
    AgentReply,
    AgentRequest,
    Attach,
    BeginInline,
    Cancel,
    CheckResidency,
    Describe,
    Described,
    Detach,
    Done,
    FinishInline,
    GetResidency,
    LoadInline,
    Publish,
    Receive,
    ReceiveDisk,
    ReceivePlan,
    ReceiveReport,
    Trace,
    decode,
    encode,
)
from weightlane.residency import WorkerResidency
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.engine_agent import WorkerEngine
    from weightlane.receiver import WorkerDescription


class WorkerAgent:
    """Holds a worker's plans, its open sync and what it serves.

    Args:
        make_engine: gives the plugin's `WorkerEngine` for a backend name; called once per backend.
        origin: how this process names itself in errors.
    """

    def __init__(self, make_engine: Callable[[str], WorkerEngine], *, origin: str) -> None:
        self._make_engine = make_engine
        self._origin = origin
        self._engines: dict[str, WorkerEngine] = {}
        self._attached: dict[str, Attached] = {}
        self._open: OpenSync | None = None
        self._last_opened: tuple[str, int] | None = None
        self._worker: int | None = None
        self._verified: dict[str, tuple[int, int]] = {}  # by lane: sync and version
        self._held_version: int | None = None
        self._not_servable_cause = ""
        self._base = BaseState()
        self._swap = AdapterSwap()
        self._turns = Turns(origin)
        self._tables = KeptTables(origin)

    @property
    def held_version(self) -> int | None:
        """The version last published here; None before the first."""
        return self._held_version

    @property
    def servable(self) -> bool:
        """False from a sync's first write until that sync, or a later one, was published."""
        return not self._not_servable_cause

    def require_servable(self) -> None:
        """Raises NotServableError while the weights are not those of one published version."""
        if self._not_servable_cause:
            raise NotServableError(
                f"{self._origin} does not serve.",
                self._not_servable_cause,
                "Run a full sync until it succeeds.",
            )

    def handle(self, message: bytes) -> bytes:
        """Decodes one `AgentRequest`, does it, and gives the encoded `AgentReply`."""
        try:
            request: AgentRequest = decode(message, AgentRequest, sender="the controller")
            with self._turns.take(type(request).__name__):
                return encode(self._answer(request))
        except Exception as error:  # noqa: BLE001 - the controller must hear of it, whatever it is
            return encode(failure_of(error, origin=self._origin))

    def load_by_reference(self, lane: str, sync: int, bucket: int, tensors: list[tuple[str, Tensor]]) -> None:
        """One bucket of an open sync without a copy, for a trainer in this same process."""
        with self._turns.take(f"bucket {bucket}"):
            opened = self._require_open(lane, sync, bucket)
            self._load(opened, opened.plan.buckets[bucket], tensors)

    # -- one method a message ---------------------------------------------------------------------------

    def _answer(self, request: AgentRequest) -> AgentReply:
        match request:
            case Describe() | GetResidency() | Trace():
                return self._tell(request)
            case Attach():
                return self._attach(request.plan)
            case Receive():
                return self._receive(request)
            case BeginInline():
                self._admit(request)
                self._attached[request.lane].require_newer(request.sync)
                self._open_sync(request.lane, request.sync, request.version)
                return Done(self._number)
            case LoadInline():
                self._load_inline(request)
                return Done(self._number)
            case FinishInline():
                return self._finish(self._require_open(request.lane, request.sync, None))
            case CheckResidency():
                self._admit(request)
                return Done(self._number)
            case ReceiveDisk():
                return self._receive_disk(request)
            case Publish():
                return self._publish(request)
            case Cancel():
                return self._cancel(request)
            case Detach():
                self._detach(request.lane)
                return Done(self._number)

    def _describe(self, backend: str) -> WorkerDescription:
        description = self._engine(backend).describe()
        self._worker = description.worker
        whole = not self._not_servable_cause and not why_not_whole(self._engine(backend))
        return msgspec.structs.replace(description, held_version=self._held_version, servable=whole)

    def _tell(self, request: Describe | GetResidency | Trace) -> AgentReply:
        if isinstance(request, Describe):
            return Described(self._describe(request.backend))
        if isinstance(request, Trace):
            return self._tables.answer(self._engine(request.backend), request.backend, request.tensors)
        if self._worker is None:  # nobody has asked this process yet which worker it is
            self._describe(request.backend)
        engine = self._engine(request.backend)
        attached = self._attached.get(request.lane)
        released = released_by(engine)
        cause = self._not_servable_cause or why_not_whole(engine)
        return WorkerResidency(
            worker=self._number,
            incarnation=engine.current_incarnation(),
            plan_digest=attached.plan.plan_digest if attached else "",
            held_version=self._held_version,
            servable=not cause and not released,
            cause=cause,
            released=released,
            base=self._base.identity if self._base.whole and not why_not_whole(engine) else "",
        )

    def _attach(self, plan: ReceivePlan) -> AgentReply:
        description = self._describe(plan.backend)
        engine = self._engine(plan.backend)
        others = self._attached.values()
        problems = attach_problems(plan, description, engine, self._base, others, receiver=self._origin)
        if problems:
            raise PlanError(problems, lane=plan.lane)
        table = self._tables.of_plan(plan, description.worker, description.incarnation)
        ring = open_ring(plan, description.worker)
        attached = Attached(plan, ring, table=table)
        require_folder(plan)
        self._base.identity = base_identity(plan, engine, self._base)
        self._detach(plan.lane)
        self._drop_abandoned()
        self._swap.take_over(plan, self._attached)
        self._attached[plan.lane] = attached
        return Done(description.worker)

    def _receive(self, request: Receive) -> ReceiveReport:
        self._admit(request)
        attached = self._attached[request.lane]
        attached.require_newer(request.sync)
        ring = require_ring(attached)
        from weightlane.ring_beat import beating

        ring.begin(request.sync)
        try:
            with beating(ring):
                opened: OpenSync | None = None
                for layout in attached.plan.buckets:
                    bucket, memory, waited = ring.take(
                        layout,
                        sync=request.sync,
                        seconds=request.wait_seconds,
                        lost_after=request.lost_after_seconds,
                    )
                    opened = opened or self._open_sync(request.lane, request.sync, request.version)
                    opened.wait_seconds += waited
                    self._arrived(opened, layout, bucket, memory)
                    del bucket, memory
                    ring.release(layout, sync=request.sync)
                return self._finish(self._require_open(request.lane, request.sync, None))
        except Exception as error:
            ring.fail(f"{type(error).__name__}: {error}")
            self._blame(request.lane, request.sync, error)
            self._drop_abandoned()
            raise

    def _receive_disk(self, request: ReceiveDisk) -> ReceiveReport:
        self._admit(request)
        plan = require_disk(self._attached[request.lane])
        from weightlane.transports.disk_reader import VersionReader

        with VersionReader(plan, request) as version:
            opened = self._open_sync(request.lane, request.sync, request.version)
            try:
                for layout in plan.buckets:
                    bucket, memory, waited = version.read(layout)
                    opened.wait_seconds += waited
                    self._arrived(opened, layout, bucket, memory)
                return self._finish(self._require_open(request.lane, request.sync, None))
            except Exception as error:
                self._blame(request.lane, request.sync, error)
                raise

    def _load_inline(self, request: LoadInline) -> None:
        opened = self._require_open(request.lane, request.sync, request.bucket)
        layout = opened.plan.buckets[request.bucket]
        self._arrived(opened, layout, *bucket_by_value(request, layout))

    def _publish(self, request: Publish) -> AgentReply:
        if self._verified.get(request.lane) != (request.sync, request.version):
            raise SyncError(
                f"Version {request.version} cannot be published on {self._origin}.",
                f"This worker has not completed sync {request.sync} of lane {request.lane} with it.",
            )
        plan = self._attached[request.lane].plan
        cause = ""
        if plan.phase is Phase.ADAPTER:
            self._not_servable_cause = f"Version {request.version} of its adapter was published in part only."
            self._swap.publish()
            if not self._base.whole:
                cause = f"Version {request.version} waits for the base of its adapter to be published."
        else:
            self._engine(plan.backend).publish(request.version)
            self._base.published()
        self._held_version = request.version
        self._not_servable_cause = cause
        del self._verified[request.lane]
        return Done(self._number)

    def _cancel(self, request: Cancel) -> AgentReply:
        self._end(request.lane, request.sync, f"Sync {request.sync} failed: {request.cause}")
        return Done(self._number)

    def _detach(self, lane: str) -> None:
        attached = self._attached.pop(lane, None)
        if attached and attached.ring:
            attached.ring.close()
        if self._last_opened and self._last_opened[0] == lane:
            self._open = None
            self._verified.clear()
            self._discard_adapter()

    @property
    def _number(self) -> int:
        return self._worker or 0

    def _drop_abandoned(self) -> None:
        """Forgets lanes whose trainer was killed: a ring's memory lives as long as it is mapped here."""
        for lane, attached in tuple(self._attached.items()):
            if attached.abandoned:
                self._detach(lane)

    # -- shared steps -----------------------------------------------------------------------------------

    def _engine(self, backend: str) -> WorkerEngine:
        if backend not in self._engines:
            self._engines[backend] = self._make_engine(backend)
        return self._engines[backend]

    def _admit(self, request: Receive | BeginInline | CheckResidency | ReceiveDisk) -> None:
        attached = require_plan(self._attached.get(request.lane), request, self._origin)
        engine = self._engine(attached.plan.backend)
        planned = request.incarnation.get(self._number)
        require_residency(attached, engine, self._base, planned=planned, origin=self._origin)

    def _open_sync(self, lane: str, sync: int, version: int) -> OpenSync:
        from weightlane.packing import WireDigest

        self._discard_adapter()  # one that a sync before had loaded and nobody published
        self._attached[lane].last_sync = sync
        plan = self._attached[lane].plan
        collector = AdapterCollector() if plan.phase is Phase.ADAPTER else None
        digest = WireDigest(plan.tensors) if plan.verify == "digest" else None
        check = self._attached[lane].read_back(self._origin)
        self._open = OpenSync(plan, sync, version, digest, collector, read_back=check)
        self._last_opened = (lane, sync)
        # The base under an adapter stays verified while that is loaded: both are published together.
        under = plan.adapter.base.sent_by if plan.adapter else ""
        self._verified = {other: seen for other, seen in self._verified.items() if other == under}
        return self._open

    def _require_open(self, lane: str, sync: int, bucket: int | None) -> OpenSync:
        return require_open(self._open, lane, sync, bucket, self._origin)

    def _arrived(self, opened: OpenSync, layout: BucketLayout, bucket: Tensor, memory: memoryview) -> None:
        """One bucket by value; nothing of it is held afterwards."""
        from weightlane.packing import unpack_bucket

        if opened.digest:
            opened.digest.update(memory, layout)
        self._load(opened, layout, unpack_bucket(bucket, layout, opened.plan.tensors))

    def _load(self, opened: OpenSync, layout: BucketLayout, tensors: list[tuple[str, Tensor]]) -> None:
        started = time.monotonic()
        try:
            if opened.collector is not None:
                opened.collector.add(tensors)
            else:
                if opened.read_back is not None:
                    opened.read_back.arrived(tensors)
                self._write(opened, tensors)
        except Exception as error:
            self._blame(opened.plan.lane, opened.sync, error)
            raise
        opened.load_seconds += time.monotonic() - started
        opened.next_bucket += 1
        opened.tensors += len(layout.entries)
        opened.nbytes += sum(entry.nbytes for entry in layout.entries)

    def _write(self, opened: OpenSync, tensors: list[tuple[str, Tensor]]) -> None:
        engine = self._engine(opened.plan.backend)
        if not opened.begun:
            # Not before the first bucket is here: a sync refused elsewhere before it moved anything
            # leaves this worker as it was.
            engine.begin(opened.version)
            opened.begun = True
            self._not_servable_cause = opened.begun_cause
            self._base.written()
            self._swap.drop_all()
        if tensors:
            opened.loaded += engine.load_weights(tensors)

    def _load_adapter(self, opened: OpenSync, collector: AdapterCollector) -> None:
        """The one call with the whole adapter, after the last bucket, be that empty."""
        tensors = collector.whole([wire.name for wire in opened.plan.tensors])
        if replaces_in_place(opened.plan):
            self._not_servable_cause = opened.begun_cause
        opened.binding = self._swap.load(
            self._engine(opened.plan.backend), opened.plan, tensors, opened.version
        )
        opened.loaded = len(tensors)

    def _finish(self, opened: OpenSync) -> ReceiveReport:
        started = time.monotonic()
        try:
            if opened.collector is not None:
                self._load_adapter(opened, opened.collector)
            else:
                self._engine(opened.plan.backend).finish(opened.version)
                read_back(opened, self._engine(opened.plan.backend))
                if opened.plan.base is not None:
                    self._base.is_now(opened.plan.base)
        except Exception as error:
            self._blame(opened.plan.lane, opened.sync, error)
            raise
        opened.load_seconds += time.monotonic() - started
        self._attached[opened.plan.lane].was_read_back |= opened.equal is not None
        self._open = None
        self._verified[opened.plan.lane] = (opened.sync, opened.version)
        return opened.report(self._number)

    def _blame(self, lane: str, sync: int, error: Exception) -> None:
        self._end(lane, sync, f"Sync {sync} failed after its first write: {type(error).__name__}: {error}")

    def _end(self, lane: str, sync: int, cause: str) -> None:
        """Drops a failed sync. One that wrote nothing, or is not the one here now, changes nothing else."""
        if self._last_opened == (lane, sync):
            self._open = None
            self._verified.clear()
            if self._not_servable_cause:
                self._not_servable_cause = cause
            self._discard_adapter()

    def _discard_adapter(self) -> None:
        """Removes what a sync had loaded and did not publish; what is served stays and goes on serving."""
        try:
            self._swap.discard()
        except Exception as error:  # noqa: BLE001 - it must not hide why the sync failed
            self._not_servable_cause = (
                f"An adapter that was never published could not be removed: {type(error).__name__}: {error}"
            )
