"""How buckets come to an agent: the ring or the folder of a lane, and one bucket by value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.buckets import slot_sizes
from weightlane.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.agent_state import Attached
    from weightlane.buckets import BucketLayout
    from weightlane.incoming import IncomingRing
    from weightlane.messages import LoadInline, ReceivePlan


def open_ring(plan: ReceivePlan, worker: int) -> IncomingRing | None:
    """This worker's end of the lane's ring; None where the transport is another.

    Raises:
        ProtocolError: the plan has no ring for this worker, or it cannot be opened.
        SyncError: memory of the GPU cannot be mapped.
    """
    if plan.transport not in ("shm", "cuda_ipc"):
        return None
    path = plan.ring.get(worker)
    if path is None:
        raise ProtocolError(
            f"The plan of lane {plan.lane} has no ring for worker {worker}.",
            f"It has rings for workers {sorted(plan.ring)}.",
        )
    if plan.transport == "cuda_ipc":
        from weightlane.transports.cuda_ipc import CudaIpcReader
        from weightlane.transports.cuda_memory import CudaMemories

        return CudaIpcReader(plan, worker, path, CudaMemories())
    from weightlane.ring import RingReader

    return RingReader(path, slot_sizes(plan.buckets))


def require_folder(plan: ReceivePlan) -> None:
    """Raises ProtocolError where the transport is `disk` and the lane's folder is not its own alone."""
    if plan.transport == "disk":
        from weightlane.transports.disk_reader import require_lane_folder

        require_lane_folder(plan.folder)


def require_ring(attached: Attached) -> IncomingRing:
    """The lane's ring; raises ProtocolError where its transport is another."""
    if attached.ring is None:
        raise ProtocolError(
            f"Lane {attached.plan.lane} has no ring on this worker.",
            f"Its transport is {attached.plan.transport}.",
        )
    return attached.ring


def require_disk(attached: Attached) -> ReceivePlan:
    """The plan; raises ProtocolError where its transport is not `disk`."""
    plan = attached.plan
    if plan.transport != "disk":
        raise ProtocolError(
            f"Lane {plan.lane} has no folder on this worker.", f"Its transport is {plan.transport}."
        )
    return plan


def bucket_by_value(request: LoadInline, layout: BucketLayout) -> tuple[Tensor, memoryview]:
    """The payload as a uint8 tensor of shape (nbytes,) and as memory.

    Raises:
        ProtocolError: it is not as long as the plan says.
    """
    import torch

    if len(request.payload) != layout.nbytes:
        raise ProtocolError(
            f"Bucket {request.bucket} of sync {request.sync} has {len(request.payload)} bytes.",
            f"The plan says {layout.nbytes}.",
        )
    # bytearray: torch wants writable memory, and a loader may keep what it was given.
    memory = bytearray(request.payload)
    bucket = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0).byte()
    return bucket, memoryview(memory)
