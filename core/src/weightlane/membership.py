"""Who takes part in a lane's syncs, on one rank: the plan, what this rank feeds, the controller's sessions.

Everything that changes when a replica comes back changes here, at one moment that all ranks agree on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weightlane.rejoin import plan_with
from weightlane.residency import ReplicaResidency, ask_together
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from weightlane.control import ControlChannel
    from weightlane.lane_groups import LaneGroups
    from weightlane.lane_messages import Rejoining, SyncGo
    from weightlane.moving import Mover
    from weightlane.plan import LanePlan
    from weightlane.planning import OpenReplica
    from weightlane.rejoin import PlanBasis
    from weightlane.replica_session import ReplicaSession
    from weightlane.transports.disk_receivers import FolderReceivers
    from weightlane.transports.ring_sink import RingSink
    from weightlane.transports.sink import Sink


@dataclass(slots=True)
class Membership:
    """The members as this rank knows them.

    `sessions` and `basis` are the controller's; other ranks have none. `joined` holds, per replica, the sync
    at which this rank last took it in (0: at connect). `broken_by` is the sync whose collectives this rank is
    in, or left before their end.
    """

    plan: LanePlan
    mover: Mover
    sessions: tuple[ReplicaSession, ...]
    basis: PlanBasis | None
    folder: FolderReceivers | None = None
    groups: LaneGroups | None = None
    joined: tuple[int, ...] = field(init=False)
    broken_by: int = 0

    def __post_init__(self) -> None:
        self.joined = (0,) * len(self.plan.replicas)

    def absent(self, go: SyncGo) -> frozenset[int]:
        """Replicas that a sync goes on without: missing ones and, in phase BASE, all that hold the base."""
        missing = {item.replica for item in go.missing}
        if self.plan.phase is not Phase.BASE:
            return frozenset(missing)
        needing = {item.replica for item in go.needs_base}
        return frozenset(range(len(self.plan.replicas))) - needing | missing

    def close(self) -> None:
        """Lets go of what this rank feeds, of its groups and, on the controller, of every replica."""
        for session in self.sessions:
            session.close()
        self.mover.close()
        if self.groups is not None:
            self.groups.close(broken=bool(self.broken_by))

    def taking_part(self, missing: Collection[int]) -> tuple[ReplicaSession, ...]:
        """On the controller: the sessions of all replicas but the missing ones."""
        return tuple(session for session in self.sessions if session.number not in missing)

    def mover_without(self, missing: Collection[int]) -> Mover:
        """What this rank moves with in a sync that goes on without the missing replicas."""
        if self.folder is not None:
            self.folder.missing = frozenset(missing)
        return self.mover.without(missing)

    def ask(self, seconds: float, *, missing: Collection[int] = ()) -> list[ReplicaResidency]:
        """On the controller: what all but the missing hold, each asked for `seconds` at most, all at once."""
        sessions = self.taking_part(missing)
        return ask_together(
            [partial(session.residency, seconds) for session in sessions],
            [(session.number, session.address) for session in sessions],
            seconds,
        )

    def distrust(self, replicas: Collection[int]) -> None:
        """Has these replicas join anew before the next sync, whatever they then say that they hold."""
        self.joined = tuple(-1 if number in replicas else old for number, old in enumerate(self.joined))

    def exchange(
        self,
        sync: int,
        returned: Sequence[Rejoining],
        sinks: Sequence[tuple[int, Sink]],
        sessions: Sequence[ReplicaSession],
        opened: Sequence[OpenReplica],
    ) -> None:
        """Takes replicas that came back in place of those they were; the last two are the controller's."""
        numbers = {item.replica for item in returned}
        self.plan = plan_with(self.plan, returned)
        self.mover = self.mover.exchanging(numbers, sinks)
        self.joined = tuple(sync if number in numbers else old for number, old in enumerate(self.joined))
        if self.basis is not None:
            kept = {session.endpoint for session in sessions}
            for session in self.sessions:
                if session.number in numbers and session.endpoint not in kept:
                    session.endpoint.close()
            new = {session.number: session for session in sessions}
            self.sessions = tuple(new.get(session.number, session) for session in self.sessions)
            self.basis = self.basis.with_returned(opened)
            if self.folder is not None:
                self.folder.sessions = self.sessions


def open_rings(
    plan: LanePlan, channel: ControlChannel, replicas: Collection[int], opened: list[RingSink]
) -> None:
    """Adds to `opened` a ring, beating, for each worker of `replicas` that this rank feeds through one."""
    from weightlane.transports.choice import make_ring

    for replica in plan.replicas:
        if not replica.transport.has_ring or replica.replica not in replicas:
            continue
        for worker, peer in enumerate(replica.peers):
            if peer == channel.rank:
                ring = make_ring(plan, replica=replica.replica, worker=worker)
                opened.append(ring)
                channel.on_beat(ring.beat)


def close_rings(channel: ControlChannel, rings: Sequence[RingSink]) -> None:
    """Ends the beats of rings and frees them."""
    for ring in rings:
        channel.off_beat(ring.beat)
        ring.close()
