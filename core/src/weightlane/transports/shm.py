"""Transport `shm`: a ring in shared memory from one trainer rank to one worker of the same host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.buckets import slot_sizes
from weightlane.packing import pack_bucket
from weightlane.transports.ring_sink import RingSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.plan import LanePlan


class ShmSink(RingSink):
    """Packs buckets into the ring's own slots."""

    def __init__(self, plan: LanePlan, *, replica: int, worker: int) -> None:
        super().__init__(plan, replica=replica, worker=worker, ring_slots=slot_sizes(plan.buckets))

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Waits for the slot, packs, posts."""
        bounds = self._opened()
        slot = self.ring.acquire(
            layout,
            sync=self._sync,
            seconds=bounds.bucket_seconds,
            lost_after=bounds.lost_after,
            check=bounds.check,
        )
        pack_bucket(slot, layout, self._plan.tensors, tensors)
        if self._digest:
            self._digest.update(self.ring.slot_memory(layout), layout)
        del slot
        self.ring.post(layout, sync=self._sync)
