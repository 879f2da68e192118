"""Which sink the controller feeds a replica through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.program import RequestMove
from weightlane.transports.inline import AgentInlineSink, RequestSink
from weightlane.transports.inprocess import InprocessSink
from weightlane.types import TransportName

if TYPE_CHECKING:
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan
    from weightlane.request_read_back import RequestReadBack
    from weightlane.transports.sink import Sink


def controller_sink(
    plan: LanePlan, number: int, endpoint: EngineEndpoint, read_back: RequestReadBack | None = None
) -> Sink | None:
    """The sink of a replica that is fed through its endpoint; None where a ring or the lane's folder does."""
    replica = plan.replicas[number]
    move = replica.program.move
    if isinstance(move, RequestMove):
        return RequestSink(plan, move, endpoint, read_back)
    match replica.transport:
        case TransportName.INLINE:
            return AgentInlineSink(plan, replica, endpoint)
        case TransportName.INPROCESS:
            return InprocessSink(plan, replica, endpoint)
        case TransportName.SHM | TransportName.DISK:
            return None
