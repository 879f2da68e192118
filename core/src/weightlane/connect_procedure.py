"""One rank's way through connect: join, plan, get ready, attach. Each step ends in an agreement of all ranks.

Nothing collective starts before every rank is known to be there, and nothing is written to a receiver.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from weightlane.agreement import put_outcome
from weightlane.connect_planning import gather_joined, plan_request
from weightlane.contexts import ExportContext, PeftConfigContext, StreamContext
from weightlane.control import CONTROLLER, RankPlace
from weightlane.errors import ExportError
from weightlane.lane_messages import Go, Joined, Planned, Ready, RingPlace
from weightlane.membership import Membership, close_rings, open_rings
from weightlane.planning import (
    EXPORT_CAPABILITIES,
    MODE_PHASES,
    make_plan,
    map_replicas,
    open_replicas,
)
from weightlane.registry import get_registry
from weightlane.rejoin import PlanBasis
from weightlane.selection import select
from weightlane.types import Phase

if TYPE_CHECKING:
    from weightlane.control import ControlChannel
    from weightlane.lane import Lane
    from weightlane.lane_groups import LaneGroups
    from weightlane.manifest import RankManifest
    from weightlane.moving import Mover
    from weightlane.plan import LanePlan
    from weightlane.planning import OpenReplica
    from weightlane.registry import Registry, Selected
    from weightlane.replica_session import ReplicaSession
    from weightlane.transports.disk_folder import LaneFolder
    from weightlane.transports.disk_receivers import FolderReceivers
    from weightlane.transports.ring_sink import RingSink
    from weightlane.transports.sink import Sink
    from weightlane.types import BackendDescriptor, Mode
    from weightlane.wishes import Wishes

_T = TypeVar("_T")


class ConnectProcedure:
    """Holds what has been opened on the way, so that a failure can undo it.

    Args:
        wishes: what the user asked for.
        channel: this rank's end of the lane's control channel.
        above: the agreed plan of the adapter, where what is connected is the base under it: a lane of its own
            to engines, with the same replicas, so that it can be sent before the adapter.
    """

    def __init__(self, wishes: Wishes, channel: ControlChannel, *, above: LanePlan | None = None) -> None:
        self._wishes = wishes
        self._above = above
        self._phase = Phase.BASE if above else MODE_PHASES[wishes.mode]
        self._keys = "connect-base" if above else "connect"
        self._base: ConnectProcedure | None = None
        self._channel = channel
        self._bounds = wishes.bounds
        self._registry: Registry = get_registry()
        self._replicas: tuple[OpenReplica, ...] = ()
        self._basis: PlanBasis | None = None
        self._rings: list[RingSink] = []
        self._sessions: list[ReplicaSession] = []
        self._folder: LaneFolder | None = None
        self._folder_receivers: FolderReceivers | None = None
        self._groups: LaneGroups | None = None

    def run(self) -> Lane:
        """The lane, on every rank, or the same error on every rank."""
        from weightlane.lane import Lane

        members, base = self._members()
        return Lane(members, channel=self._channel, bounds=self._bounds, registry=self._registry, base=base)

    def _members(self) -> tuple[Membership, Membership | None]:
        """Who takes part, and who does in the base part: an engine learns first which base is meant."""
        selected, export = self._join()
        plan = self._agree_on_plan(selected)
        under = None
        if plan.sends_base and plan.trained_on is not None:
            wishes = dataclasses.replace(self._wishes, lane=plan.trained_on.sent_by)
            self._base = ConnectProcedure(wishes, self._channel, above=plan)
            under, _ = self._base._members()
        self._get_ready(plan)
        mover = self._attach(plan, selected, export)
        sessions = tuple(self._sessions)
        members = Membership(plan, mover, sessions, self._basis, self._folder_receivers, self._groups)
        return members, under

    def undo(self) -> None:
        """Frees what was opened, after a failure."""
        if self._base is not None:
            self._base.undo()
        close_rings(self._channel, self._rings)
        if self._groups is not None:
            self._groups.close()
        for session in self._sessions:
            session.close()
        if self._folder is not None:
            from weightlane.transports.disk_folder import close_lane_folder

            close_lane_folder(self._folder, self._bounds.bucket)
        for replica in self._replicas:
            replica.endpoint.close()

    @property
    def _is_controller(self) -> bool:
        return self._channel.rank == CONTROLLER

    # -- join: this rank's manifest, or why there is none ---------------------------------------------------

    def _join(self) -> tuple[Selected | None, ExportContext | None]:
        chosen: list[tuple[Selected, ExportContext]] = []

        def describe() -> Joined:
            if self._wishes.locked is not None:
                self._registry = self._registry.under_lock(self._wishes.locked)
            chosen.append(self._select_trainer())
            selected, export = chosen[0]
            manifest = self._with_adapter(
                selected, export, self._registry.call_describe_export(selected, export)
            )
            place = RankPlace(self._channel.rank, socket.gethostname(), os.getpid())
            return Joined(place, manifest, self._arguments())

        put_outcome(self._channel, f"{self._keys}/join/{self._channel.rank}", describe)
        return chosen[0] if chosen else (None, None)

    def _with_adapter(
        self, selected: Selected, export: ExportContext, manifest: RankManifest
    ) -> RankManifest:
        if export.phase is not Phase.ADAPTER or export.model is None:
            return manifest
        context = PeftConfigContext(selected.descriptor, export, manifest.tensors)
        return replace(manifest, adapter=self._registry.call_normalize_peft_config(selected, context))

    def _arguments(self) -> dict[str, str]:
        held = self._registry.locks.held
        return {**self._wishes.shared(), "locked": f"lock {held.lock.digest}" if held else "None"}

    def _select_trainer(self) -> tuple[Selected, ExportContext]:
        spec = self._wishes.trainer
        facts = self._registry.collect_facts(spec.engine)
        selected = select(self._registry, "trainer", spec.engine, facts, pin=spec.plugin)
        if self._above is None:
            _require_export(selected.descriptor, self._wishes.mode)
        export = ExportContext(
            descriptor=selected.descriptor,
            model=spec.model,
            phase=self._phase,
            rank=self._channel.rank,
            world_size=self._channel.world_size,
            options=spec.options_for(selected.descriptor),
        )
        return selected, export

    # -- plan: made by the controller, agreed by all ----------------------------------------------------

    def _agree_on_plan(self, selected: Selected | None) -> LanePlan:
        if self._is_controller:
            put_outcome(self._channel, f"{self._keys}/plan", lambda: self._make_plan(selected))
        planned = self._await(f"{self._keys}/plan", Planned)
        self._channel.know_places(planned.places)
        return planned.plan

    def _make_plan(self, selected: Selected | None) -> Planned:
        joined = gather_joined(
            self._channel,
            self._keys,
            self._arguments(),
            seconds=self._bounds.connect,
            lane=self._wishes.lane,
        )
        request = plan_request(self._wishes, selected, self._above)
        self._replicas = open_replicas(self._registry, request)
        parts = tuple(item.manifest for item in joined)
        self._replicas = map_replicas(self._registry, request, parts, self._replicas)
        plan = make_plan(self._registry, request, parts, self._replicas)
        self._basis = PlanBasis(self._registry, request, parts, self._replicas)
        return Planned(plan, tuple(item.place for item in joined))

    # -- ready: rings on the ranks that send, the lane's own group where collectives are needed ------------

    def _get_ready(self, plan: LanePlan) -> None:
        rank = self._channel.rank
        put_outcome(self._channel, f"{self._keys}/ready/{rank}", lambda: self._make_rings(plan))
        if self._is_controller:
            put_outcome(self._channel, f"{self._keys}/go", self._everyone_ready)
        self._await(f"{self._keys}/go", Go)
        put_outcome(self._channel, f"{self._keys}/group/{rank}", lambda: self._make_group(plan))

    def _make_rings(self, plan: LanePlan) -> Ready:
        if self._is_controller and plan.over_disk:
            from weightlane.transports.disk_folder import open_lane_folder

            self._folder = open_lane_folder(plan.lane, plan.folder, self._bounds.connect)
        open_rings(plan, self._channel, range(len(plan.replicas)), self._rings)
        return Ready(tuple(ring.place for ring in self._rings))

    def _everyone_ready(self) -> Go:
        self._gather_ready()
        return Go()

    def _gather_ready(self) -> list[RingPlace]:
        ready = self._channel.gather(f"{self._keys}/ready", Ready, seconds=self._bounds.connect)
        return [place for item in ready for place in item.rings]

    def _make_group(self, plan: LanePlan) -> Go:
        from weightlane.lane_groups import make_groups

        self._groups = make_groups(plan.manifest, self._bounds.collective)
        return Go()

    # -- attach: the workers get the plan -----------------------------------------------------------------

    def _attach(self, plan: LanePlan, selected: Selected | None, export: ExportContext | None) -> Mover:
        movers: list[Mover] = []

        def attach_all() -> Go:
            self._channel.gather(f"{self._keys}/group", Go, seconds=self._bounds.connect)
            self._attach_replicas(plan)
            movers.append(self._mover(plan, selected, export))
            return Go()

        if self._is_controller:
            put_outcome(self._channel, f"{self._keys}/attached", attach_all)
        self._await(f"{self._keys}/attached", Go)
        for ring in self._rings:
            ring.attached()
        return movers[0] if movers else self._mover(plan, selected, export)

    def _attach_replicas(self, plan: LanePlan) -> None:
        from weightlane.replica_session import ReplicaSession

        places = self._gather_ready()
        for replica in self._replicas:
            session = ReplicaSession(
                plan, replica.number, replica.endpoint, self._bounds, tables=replica.tables
            )
            self._sessions.append(session)
            session.attach(places, self._folder.path if self._folder else "")

    def _mover(self, plan: LanePlan, selected: Selected | None, export: ExportContext | None) -> Mover:
        from weightlane.moving import ALL_REPLICAS, Mover
        from weightlane.transports.choice import controller_sink
        from weightlane.transports.disk import DiskSink
        from weightlane.transports.disk_receivers import FolderReceivers

        if selected is None or export is None:
            raise AssertionError("a rank that could not describe its export cannot have agreed on a plan")
        fed: list[tuple[int, Sink]] = [(ring.replica, ring) for ring in self._rings]
        for session in self._sessions:
            sink = controller_sink(plan, session.number, session.endpoint, session.read_back, session.adapter)
            if sink is not None:
                fed.append((session.number, sink))
        folder = None
        if self._folder is not None:
            self._folder_receivers = FolderReceivers(plan, tuple(self._sessions))
            folder = DiskSink(plan, self._folder, self._folder_receivers)
            fed.append((ALL_REPLICAS, folder))
        sinks = tuple(sink for _, sink in fed)
        stream = StreamContext(
            export=export,
            manifest=plan.manifest,
            entries=plan.entries,
            tensors=plan.tensors,
            buckets=plan.buckets,
            group=self._groups.everyone if self._groups else None,
            serving_ranks=plan.serving_ranks,
            wanted=bool(sinks),
            groups=self._groups.parts if self._groups else {},
            collective_seconds=self._bounds.collective,
        )
        return Mover(
            self._registry,
            selected,
            stream,
            sinks,
            tuple(self._rings),
            self._channel,
            folder,
            tuple(number for number, _ in fed),
        )

    def _await(self, key: str, kind: type[_T]) -> _T:
        """Waits for the controller's word; the controller itself may wait for ranks and then for engines."""
        return self._channel.get(key, kind, seconds=3 * self._bounds.connect, awaited=(CONTROLLER,))


def _require_export(descriptor: BackendDescriptor, mode: Mode) -> None:
    if EXPORT_CAPABILITIES[mode] not in descriptor.capabilities:
        raise ExportError(
            f"Trainer backend {descriptor.name} cannot export mode {mode.value}.",
            f"It can: {', '.join(sorted(item.value for item in descriptor.capabilities))}.",
            "Choose another mode or trainer.",
        )
