"""`connect`: every rank describes, the controller plans, all ranks agree, then handles are exchanged once."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weightlane.bounds import DEFAULT_BOUNDS, Bounds
from weightlane.buckets import DEFAULT_BUCKET_BYTES
from weightlane.contexts import ExportContext, RolloutTarget, StreamContext
from weightlane.errors import EngineError, ExportError, PlanError, Problem, WeightlaneError, near_names
from weightlane.types import Capability, Mode, Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from weightlane.control import ControlChannel
    from weightlane.endpoint import EngineEndpoint
    from weightlane.lane import Lane
    from weightlane.lane_messages import Joined, Planned
    from weightlane.moving import Mover
    from weightlane.plan import LanePlan
    from weightlane.planning import OpenReplica, PlanRequest
    from weightlane.registry import Registry, Selected
    from weightlane.replica_session import ReplicaSession
    from weightlane.transports.shm import ShmSink
    from weightlane.transports.sink import Sink
    from weightlane.types import BackendDescriptor, VerifyLevel

_lane_numbers = itertools.count(1)
_EXPORT: dict[Mode, Capability] = {
    Mode.FULL: Capability.EXPORT_FULL,
    Mode.MERGED: Capability.EXPORT_MERGED,
    Mode.ADAPTER: Capability.EXPORT_ADAPTER,
}


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Where weights come from; made by `trainer`."""

    engine: str
    model: Any
    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Where weights go; made by `rollout`."""

    target: RolloutTarget
    plugin: str | None = None


def trainer(
    engine: str,
    *,
    model: Any,
    placement: Literal["replicated", "partitioned"] = "replicated",
    plugin: str | None = None,
) -> TrainerSpec:
    """Names the trainer of this rank.

    Args:
        engine: `torch` (a plain module, a mapping of named tensors, or None on a rank that holds nothing).
        model: this rank's model; tensors are looked up in it afresh at every sync.
        placement: `replicated`: every rank holds every tensor, else the plan is an error. `partitioned`:
            a tensor may live on some ranks only and is broadcast to those that send it.
        plugin: pins the backend to one distribution, as `acme-fsdp` or `acme-fsdp==1.2.*`.
    """
    return TrainerSpec(engine, model, plugin, {"placement": placement})


def rollout(
    engine: str,
    *,
    url: str = "",
    handle: Any = None,
    model: str = "",
    plugin: str | None = None,
) -> RolloutSpec:
    """Names one replica of a rollout engine; used on the controller (rank 0), ignored elsewhere.

    Args:
        engine: `reference`, `vllm` or `sglang`.
        url: `unix:/path` or `tcp:host:port` of a weightlane front beside the engine, or the `http://` URL of
            a server. What an HTTP server is sent may be a format that executes code there (SGLang's wire is
            pickle); it goes to this URL alone.
        handle: an engine object living in this process, in place of `url`.
        model: the checkpoint folder that the engine was started from, where it cannot tell by itself.
        plugin: pins the backend to one distribution.
    """
    if bool(url) == (handle is not None):
        raise EngineError(
            f"rollout({engine!r}) needs exactly one of url= and handle=.",
            "An engine is reached at an address or is an object in this process.",
            "Pass one of them.",
        )
    return RolloutSpec(RolloutTarget(engine, address=url, handle=handle, model=model), plugin)


def connect(
    *,
    trainer: TrainerSpec,
    rollout: Sequence[RolloutSpec] | None,
    mode: Mode | Literal["full", "merged", "adapter"] = Mode.FULL,
    verify: VerifyLevel = "digest",
    transport: TransportName | Literal["inprocess", "shm", "inline"] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    control: str | None = None,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> Lane:
    """Joins a trainer to rollout engines. Every trainer rank calls it, with the same arguments but `model`.

    Ranks are those of `torch.distributed` where it is initialised, else there is one. Rank 0 is the
    controller; `rollout` matters there alone. Nothing is sent and no receiver is touched before the plan is
    agreed; a problem on one rank is the same error on all.

    Args:
        trainer: this rank's part of the export.
        rollout: the replicas, on rank 0; None or anything elsewhere.
        mode: what to move.
        verify: `off`, `counts`, or `digest` (counts and an xxh3 over every byte on both sides).
        transport: None chooses: by reference in one process, a ring on one host, by value otherwise.
        bucket_bytes: size of one bucket; a larger tensor travels alone.
        control: `tcp://host:port` of the control channel, equal on all ranks; None asks the store that
            `torch.distributed` was initialised with.
        bounds: every wait's limit.

    Raises:
        PlanError: every problem of the plan at once.
        WeightlaneError: an engine that does not answer, no backend, a lost rank.
    """
    from weightlane.rendezvous import open_control_channel

    rank, world_size = _place_among_ranks()
    number = next(_lane_numbers)
    channel = open_control_channel(
        address=control,
        lane=f"lane-{number}",
        rank=rank,
        world_size=world_size,
        lost_after=bounds.lost_after,
    )
    procedure = _Connect(
        trainer=trainer,
        targets=tuple(rollout or ()) if rank == 0 else (),
        mode=Mode(mode),
        verify=verify,
        transport=None if transport is None else TransportName(transport),
        bucket_bytes=bucket_bytes,
        bounds=bounds,
        channel=channel,
        lane=f"lane-{number}-{secrets.token_hex(3)}",
    )
    try:
        return procedure.run()
    except BaseException:
        procedure.undo()
        channel.close()
        raise


def _place_among_ranks() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Connect:
    """One rank's way through connect: join, plan, get ready, attach. Each step ends in an agreement."""

    def __init__(
        self,
        *,
        trainer: TrainerSpec,
        targets: tuple[RolloutSpec, ...],
        mode: Mode,
        verify: VerifyLevel,
        transport: TransportName | None,
        bucket_bytes: int,
        bounds: Bounds,
        channel: ControlChannel,
        lane: str,
    ) -> None:
        from weightlane.registry import get_registry

        self._trainer = trainer
        self._targets = targets
        self._mode = mode
        self._verify = verify
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._bounds = bounds
        self._channel = channel
        self._lane = lane
        self._registry: Registry = get_registry()
        self._replicas: tuple[OpenReplica, ...] = ()
        self._rings: list[ShmSink] = []

    @property
    def _is_controller(self) -> bool:
        return self._channel.rank == 0

    def run(self) -> Lane:
        from weightlane.lane import Lane

        selected, export = self._join()
        plan = self._agree_on_plan(selected)
        group = self._get_ready(plan)
        sessions = self._attach(plan)
        mover = self._mover(plan, selected, export, group, sessions)
        return Lane(
            plan,
            rank=self._channel.rank,
            channel=self._channel,
            mover=mover,
            sessions=sessions,
            bounds=self._bounds,
            registry=self._registry,
        )

    def undo(self) -> None:
        """Frees what was opened, after a failure."""
        for ring in self._rings:
            self._channel.off_beat(ring.beat)
            ring.close()
        for replica in self._replicas:
            replica.endpoint.close()

    # -- join: this rank's manifest, or why there is none ---------------------------------------------------

    def _join(self) -> tuple[Selected | None, ExportContext | None]:
        from weightlane.control import RankPlace
        from weightlane.lane_messages import Joined
        from weightlane.messages import failure_of

        key = f"connect/join/{self._channel.rank}"
        try:
            selected, export = self._select_trainer()
            manifest = self._registry.call_describe_export(selected, export)
        except Exception as error:
            self._channel.put(key, failure_of(error, origin=f"rank {self._channel.rank}"))
            return None, None
        place = RankPlace(self._channel.rank, socket.gethostname(), os.getpid())
        self._channel.put(key, Joined(place, manifest))
        return selected, export

    def _select_trainer(self) -> tuple[Selected, ExportContext]:
        from weightlane.selection import select

        spec = self._trainer
        facts = self._registry.collect_facts(spec.engine)
        selected = select(self._registry, "trainer", spec.engine, facts, pin=spec.plugin)
        descriptor = selected.descriptor
        _require_capability(descriptor, _EXPORT[self._mode], self._mode)
        options = {name: value for name, value in spec.options.items() if name in descriptor.options}
        given = {name for name, value in spec.options.items() if value != "replicated"}
        for name in sorted(given - descriptor.options):
            raise ExportError(
                f"Trainer backend {descriptor.name} has no option {name!r}.",
                f"It has: {', '.join(sorted(descriptor.options)) or 'none'}.",
                f"Near: {', '.join(near_names(name, descriptor.options)) or 'nothing'}.",
            )
        export = ExportContext(
            descriptor=descriptor,
            model=spec.model,
            phase=_phase_of(self._mode),
            rank=self._channel.rank,
            world_size=self._channel.world_size,
            options=options,
        )
        return selected, export

    # -- plan: made by the controller, agreed by all ----------------------------------------------------------

    def _agree_on_plan(self, selected: Selected | None) -> LanePlan:
        from weightlane.lane_messages import Planned
        from weightlane.messages import failure_of

        if self._is_controller:
            try:
                self._channel.put("connect/plan", self._make_plan(selected))
            except Exception as error:
                self._channel.put("connect/plan", failure_of(error, origin="the controller"))
        planned = self._channel.get(
            "connect/plan", Planned, seconds=self._bounds.connect, awaited=(0,), abort=""
        )
        self._channel.know_places(planned.places)
        return planned.plan

    def _make_plan(self, selected: Selected | None) -> Planned:
        from weightlane.lane_messages import Joined, Planned
        from weightlane.planning import make_plan, open_replicas

        joined = self._gather_joined(Joined)
        request = self._request(selected)
        self._replicas = open_replicas(self._registry, request)
        plan = make_plan(self._registry, request, [item.manifest for item in joined], self._replicas)
        return Planned(plan, tuple(item.place for item in joined))

    def _gather_joined(self, kind: type[Joined]) -> list[Joined]:
        """Every rank's manifest. Failures of several ranks become one error that names each."""
        joined: list[Joined] = []
        failures: list[WeightlaneError] = []
        for rank in range(self._channel.world_size):
            try:
                joined.append(
                    self._channel.get(
                        f"connect/join/{rank}",
                        kind,
                        seconds=self._bounds.connect,
                        awaited=range(self._channel.world_size),
                    )
                )
            except WeightlaneError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise PlanError(
                [
                    Problem("export", f"failure {number}", str(error))
                    for number, error in enumerate(failures, 1)
                ],
                lane=self._lane,
            )
        return joined

    def _request(self, selected: Selected | None) -> PlanRequest:
        from weightlane.planning import PlanRequest

        return PlanRequest(
            lane=self._lane,
            mode=self._mode,
            verify=self._verify,
            bucket_bytes=self._bucket_bytes,
            transport=self._transport,
            trainer_backend=selected.reference if selected else self._trainer.engine,
            targets=tuple(spec.target for spec in self._targets),
            pins=tuple(spec.plugin for spec in self._targets),
            open_seconds=self._bounds.connect,
        )

    # -- ready: rings on the ranks that send, the lane's own group where collectives are needed ------------

    def _get_ready(self, plan: LanePlan) -> ProcessGroup | None:
        from weightlane.lane_messages import Go, Ready, RingPlace
        from weightlane.messages import failure_of
        from weightlane.transports.shm import ShmSink

        key = f"connect/ready/{self._channel.rank}"
        try:
            for replica in plan.replicas:
                if replica.transport is not TransportName.SHM:
                    continue
                for worker, peer in enumerate(replica.peers):
                    if peer == self._channel.rank:
                        self._rings.append(ShmSink(plan, replica=replica.replica, worker=worker))
            places = tuple(RingPlace(ring.replica, ring.worker, ring.path) for ring in self._rings)
            self._channel.put(key, Ready(places))
        except Exception as error:
            self._channel.put(key, failure_of(error, origin=f"rank {self._channel.rank}"))
        if self._is_controller:
            try:
                self._channel.gather("connect/ready", Ready, seconds=self._bounds.connect)
                self._channel.put("connect/go", Go())
            except Exception as error:
                self._channel.put("connect/go", failure_of(error, origin="the controller"))
        self._channel.get("connect/go", Go, seconds=self._bounds.connect, awaited=(0,))
        return self._make_group(plan)

    def _make_group(self, plan: LanePlan) -> ProcessGroup | None:
        if not plan.manifest.collective or plan.world_size == 1:
            return None
        from datetime import timedelta

        import torch.distributed as dist

        backend = dist.get_backend()
        return dist.new_group(
            ranks=list(range(plan.world_size)),
            timeout=timedelta(seconds=self._bounds.collective),
            backend="gloo" if "gloo" in backend else backend,
        )

    # -- attach: the workers get the plan -----------------------------------------------------------------

    def _attach(self, plan: LanePlan) -> tuple[ReplicaSession, ...]:
        from weightlane.lane_messages import Go
        from weightlane.messages import failure_of

        for ring in self._rings:
            self._channel.on_beat(ring.beat)
        sessions: tuple[ReplicaSession, ...] = ()
        if self._is_controller:
            try:
                sessions = self._attach_replicas(plan)
                self._channel.put("connect/attached", Go())
            except Exception as error:
                self._channel.put("connect/attached", failure_of(error, origin="the controller"))
        self._channel.get("connect/attached", Go, seconds=self._bounds.connect, awaited=(0,))
        return sessions

    def _attach_replicas(self, plan: LanePlan) -> tuple[ReplicaSession, ...]:
        from weightlane.lane_messages import Ready
        from weightlane.replica_session import ReplicaSession

        ready = self._channel.gather("connect/ready", Ready, seconds=self._bounds.connect)
        places = [place for item in ready for place in item.rings]
        sessions: list[ReplicaSession] = []
        for replica in self._replicas:
            session = ReplicaSession(plan, replica.number, replica.endpoint, self._bounds)
            session.attach({place.worker: place.path for place in places if place.replica == replica.number})
            sessions.append(session)
        return tuple(sessions)

    def _mover(
        self,
        plan: LanePlan,
        selected: Selected | None,
        export: ExportContext | None,
        group: ProcessGroup | None,
        sessions: Sequence[ReplicaSession],
    ) -> Mover:
        from weightlane.moving import Mover

        if selected is None or export is None:
            raise AssertionError("a rank without a manifest cannot have agreed on a plan")
        sinks: list[Sink] = [*self._rings]
        for session, replica in zip(sessions, plan.replicas, strict=False):
            sink = _controller_sink(plan, replica.replica, session.endpoint)
            if sink is not None:
                sinks.append(sink)
        stream = StreamContext(
            export=export,
            manifest=plan.manifest,
            entries=plan.entries,
            tensors=plan.tensors,
            buckets=plan.buckets,
            group=group,
            serving_ranks=plan.serving_ranks,
            wanted=bool(sinks),
        )
        return Mover(self._registry, selected, stream, tuple(sinks), tuple(self._rings), self._channel)


def _controller_sink(plan: LanePlan, number: int, endpoint: EngineEndpoint) -> Sink | None:
    """The sink of a replica that is fed through its endpoint; None where ranks feed it by ring."""
    from weightlane.program import RequestMove
    from weightlane.transports.inline import AgentInlineSink, RequestSink
    from weightlane.transports.inprocess import InprocessSink

    replica = plan.replicas[number]
    move = replica.program.move
    if isinstance(move, RequestMove):
        return RequestSink(plan, move, endpoint)
    if replica.transport is TransportName.INLINE:
        return AgentInlineSink(plan, replica, endpoint)
    if replica.transport is TransportName.INPROCESS:
        return InprocessSink(plan, replica, endpoint)
    return None


def _require_capability(descriptor: BackendDescriptor, needed: Capability, mode: Mode) -> None:
    if needed not in descriptor.capabilities:
        raise ExportError(
            f"Trainer backend {descriptor.name} cannot export mode {mode.value}.",
            f"It can: {', '.join(sorted(item.value for item in descriptor.capabilities))}.",
            "Choose another mode or trainer.",
        )


def _phase_of(mode: Mode) -> Phase:
    return {Mode.FULL: Phase.FULL, Mode.MERGED: Phase.MERGED, Mode.ADAPTER: Phase.ADAPTER}[mode]
