"""Transport `cuda_ipc`: slots in memory of one GPU, from a trainer rank on it to the worker on it.

The ring in shared memory carries the words alone: what was posted, released, failed. The rank allocates the
slots once, at connect, and the worker maps them once, so that no handle is opened during a sync. A bucket is
posted when the device has finished packing it, and released when the device has finished loading it: the two
processes share no stream, and a word in memory overtakes whatever is still queued on one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.buckets import slot_sizes
from weightlane.errors import ProtocolError
from weightlane.packing import memory_of, pack_bucket
from weightlane.ring import RingReader
from weightlane.transports.ring_sink import RingSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.device_memory import DeviceMemories
    from weightlane.lane_messages import RingPlace
    from weightlane.messages import ReceivePlan
    from weightlane.plan import LanePlan

_DETACH_SECONDS = 5.0


class DeviceSlots:
    """Where the slots of a plan's buckets lie in one allocation: one after another, each aligned."""

    def __init__(self, buckets: Sequence[BucketLayout]) -> None:
        sizes = slot_sizes(buckets)
        self.count = len(sizes)
        self.nbytes = sum(sizes)
        self._starts = (0, *accumulate(sizes))

    def start(self, layout: BucketLayout) -> int:
        """The offset of the bucket's slot in the allocation."""
        return self._starts[layout.slot]

    @property
    def ring_slots(self) -> tuple[int, ...]:
        """Bytes of each slot that lie in the ring: none."""
        return (0,) * self.count


class CudaIpcSink(RingSink):
    """Packs buckets into memory of the worker's GPU, which this rank owns.

    Args:
        plan: the lane's plan, which names the GPU.
        replica: the replica's number.
        worker: the worker's number in it.
        memories: makes the allocation.

    Raises:
        ProtocolError: this process does not see that GPU.
        SyncError: the GPU has no such memory free.
    """

    def __init__(self, plan: LanePlan, *, replica: int, worker: int, memories: DeviceMemories) -> None:
        self._slots = DeviceSlots(plan.buckets)
        super().__init__(plan, replica=replica, worker=worker, ring_slots=self._slots.ring_slots)
        try:
            self._memory = memories.allocate(plan.replicas[replica].gpus[worker], self._slots.nbytes)
        except BaseException:
            self.ring.close()
            raise

    @property
    def place(self) -> RingPlace:
        """What the worker is told of it."""
        return replace(super().place, memory=self._memory.handle)

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Waits for the slot, packs, waits for the device, posts."""
        bounds = self._opened()
        self.ring.wait_free(
            layout,
            sync=self._sync,
            seconds=bounds.bucket_seconds,
            lost_after=bounds.lost_after,
            check=bounds.check,
        )
        slot = self._memory.slot(self._slots.start(layout), layout.nbytes)
        pack_bucket(slot, layout, self._plan.tensors, tensors)
        self._memory.settle()
        if self._digest:
            self._digest.update(memory_of(slot.cpu()), layout)
        del slot
        self.ring.post(layout, sync=self._sync)

    def close(self) -> None:
        """Frees the memory, once the worker has unmapped it or is gone, as far as can be waited for."""
        self.ring.wait_detached(_DETACH_SECONDS)
        self._memory.close()
        super().close()


class CudaIpcReader:
    """The worker's end: the ring's words, and the slots mapped from the rank's memory.

    Args:
        plan: as it was attached.
        worker: this worker's number.
        path: the ring's file.
        memories: maps the memory.

    Raises:
        ProtocolError: the plan has no memory for this worker, or of another size; or the ring cannot be
            opened, or this process does not see that GPU.
        SyncError: the driver does not map it.
    """

    def __init__(self, plan: ReceivePlan, worker: int, path: str, memories: DeviceMemories) -> None:
        self._slots = DeviceSlots(plan.buckets)
        self._digests = plan.verify == "digest"
        handle = plan.memory.get(worker)
        if handle is None or handle.nbytes != self._slots.nbytes:
            told = "none" if handle is None else f"{handle.nbytes} bytes"
            raise ProtocolError(
                f"The plan of lane {plan.lane} has {told} of device memory for worker {worker}.",
                f"Its slots need {self._slots.nbytes} bytes.",
                "Close the lane and connect again.",
            )
        self._ring = RingReader(path, self._slots.ring_slots)
        try:
            self._memory = memories.open(handle)
        except BaseException:
            self._ring.close()
            raise

    def begin(self, sync: int) -> None:
        """Shows the sender that this worker reads sync `sync`."""
        self._ring.begin(sync)

    def beat(self) -> None:
        """Shows the sender that this process lives."""
        self._ring.beat()

    def take(
        self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float
    ) -> tuple[Tensor, memoryview, float]:
        """Waits for the bucket; gives its bytes on the GPU, the same here for a digest, and the seconds."""
        waited = self._ring.wait_posted(layout, sync=sync, seconds=seconds, lost_after=lost_after)
        slot = self._memory.slot(self._slots.start(layout), layout.nbytes)
        return slot, memory_of(slot.cpu()) if self._digests else memoryview(b""), waited

    def release(self, layout: BucketLayout, *, sync: int) -> None:
        """Gives the slot back, once the device has read it; every view of it must be gone."""
        self._memory.settle()
        self._ring.release(layout, sync=sync)

    def is_abandoned(self) -> bool:
        """Whether the sender has closed its end or its process is gone."""
        return self._ring.is_abandoned()

    def fail(self, cause: str) -> None:
        """Tells the sender that this worker stopped reading its current sync, and why."""
        self._ring.fail(cause)

    def close(self) -> None:
        """Unmaps, then tells the sender so."""
        try:
            self._memory.close()
        finally:
            self._ring.close()
