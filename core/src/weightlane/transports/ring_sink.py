"""What the transports with a ring share: one ring from one trainer rank to one worker of the same host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from weightlane.lane_messages import RingPlace
from weightlane.packing import WireDigest
from weightlane.ring import RingWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.plan import LanePlan
    from weightlane.transports.sink import SinkBounds


class RingSink(ABC):
    """A `Sink` over the ring that worker `worker` of replica `replica` reads.

    Args:
        plan: the lane's plan.
        replica: the replica's number.
        worker: the worker's number in it.
        ring_slots: bytes of each slot that lie in the ring itself.
    """

    def __init__(self, plan: LanePlan, *, replica: int, worker: int, ring_slots: Sequence[int]) -> None:
        self._plan = plan
        self.replica = replica
        self.worker = worker
        self.ring = RingWriter(
            label=f"{plan.lane}-{replica}-{worker}",
            slot_sizes=ring_slots,
            peer=f"worker {worker} of {plan.replicas[replica].address}",
        )
        self._sync = 0
        self._bounds: SinkBounds | None = None
        self._digest: WireDigest | None = None

    @property
    def path(self) -> str:
        """The ring's file."""
        return str(self.ring.path)

    @property
    def place(self) -> RingPlace:
        """What the worker is told of it."""
        return RingPlace(self.replica, self.worker, self.path)

    def attached(self) -> None:
        """The worker has the ring open; its name is not needed any more."""
        self.ring.hide()

    def beat(self) -> None:
        """Shows the worker that this rank lives; called about once a second from the beating thread."""
        self.ring.beat()

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:  # noqa: ARG002 - a Sink's
        """Clears the ring for a new sync."""
        self._sync, self._bounds = sync, bounds
        self._digest = WireDigest(self._plan.tensors) if self._plan.verify == "digest" else None
        self.ring.begin(sync)

    @abstractmethod
    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Waits for the slot, packs, posts."""

    def finish(self) -> str:
        """Waits until the worker has released every slot."""
        bounds = self._opened()
        self.ring.drain(
            sync=self._sync, seconds=bounds.bucket_seconds, lost_after=bounds.lost_after, check=bounds.check
        )
        return self._digest.hexdigest() if self._digest else ""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Leaves the cause in the ring's header, where the waiting worker reads it."""
        self.ring.abort(cause, sync=sync)

    def close(self) -> None:
        """Removes the ring's file."""
        self.ring.close()

    def _opened(self) -> SinkBounds:
        if self._bounds is None:
            raise RuntimeError("begin() comes before put() and finish()")
        return self._bounds
