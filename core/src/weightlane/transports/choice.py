"""Which sink a replica is fed through: by the controller, or by a rank over a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.program import AdapterMove, RequestMove
from weightlane.transports.inline import AdapterRequestSink, AgentInlineSink, RequestSink
from weightlane.transports.inprocess import InprocessSink
from weightlane.types import TransportName

if TYPE_CHECKING:
    from weightlane.adapter_requests import RequestedAdapter
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan
    from weightlane.request_read_back import RequestReadBack
    from weightlane.transports.ring_sink import RingSink
    from weightlane.transports.sink import Sink


def controller_sink(
    plan: LanePlan,
    number: int,
    endpoint: EngineEndpoint,
    read_back: RequestReadBack | None = None,
    adapter: RequestedAdapter | None = None,
) -> Sink | None:
    """The sink of a replica that is fed through its endpoint; None where a ring or the lane's folder does."""
    replica = plan.replicas[number]
    move = replica.program.move
    if isinstance(move, RequestMove):
        return RequestSink(plan, move, endpoint, read_back)
    if isinstance(move, AdapterMove):
        if adapter is None:
            raise AssertionError("the session of such a replica has it")
        return AdapterRequestSink(plan, adapter)
    match replica.transport:
        case TransportName.INLINE:
            return AgentInlineSink(plan, replica, endpoint)
        case TransportName.INPROCESS:
            return InprocessSink(plan, replica, endpoint)
        case TransportName.SHM | TransportName.CUDA_IPC | TransportName.DISK | TransportName.COLLECTIVE:
            return None


def make_ring(plan: LanePlan, *, replica: int, worker: int) -> RingSink:
    """The ring that feeds one worker of a replica whose transport has them.

    Raises:
        SyncError: the memory for it cannot be had.
        ProtocolError: this rank does not see the worker's GPU.
    """
    if plan.replicas[replica].transport is TransportName.CUDA_IPC:
        from weightlane.transports.cuda_ipc import CudaIpcSink
        from weightlane.transports.cuda_memory import CudaMemories

        return CudaIpcSink(plan, replica=replica, worker=worker, memories=CudaMemories())
    from weightlane.transports.shm import ShmSink

    return ShmSink(plan, replica=replica, worker=worker)
