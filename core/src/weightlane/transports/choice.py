"""Which sink the controller feeds a replica through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.program import RequestMove
from weightlane.transports.disk import DiskSink
from weightlane.transports.inline import AgentInlineSink, RequestSink
from weightlane.transports.inprocess import InprocessSink
from weightlane.types import TransportName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan
    from weightlane.replica_session import ReplicaSession
    from weightlane.transports.disk_folder import LaneFolder
    from weightlane.transports.sink import Sink


def controller_sink(plan: LanePlan, number: int, endpoint: EngineEndpoint) -> Sink | None:
    """The sink of a replica that is fed through its endpoint; None where a ring or the lane's folder does."""
    replica = plan.replicas[number]
    move = replica.program.move
    if isinstance(move, RequestMove):
        return RequestSink(plan, move, endpoint)
    match replica.transport:
        case TransportName.INLINE:
            return AgentInlineSink(plan, replica, endpoint)
        case TransportName.INPROCESS:
            return InprocessSink(plan, replica, endpoint)
        case TransportName.SHM | TransportName.DISK:
            return None


def folder_sink(plan: LanePlan, folder: LaneFolder, sessions: Sequence[ReplicaSession]) -> DiskSink:
    """The one sink of all replicas that read the lane's folder; `sessions` are the plan's, in its order."""
    receivers = [
        session.load_from_disk
        for session, replica in zip(sessions, plan.replicas, strict=True)
        if replica.transport is TransportName.DISK
    ]
    return DiskSink(plan, folder, receivers)
