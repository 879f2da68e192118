"""What an agent reads a sync's buckets from, whichever memory they lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.buckets import BucketLayout


class IncomingRing(Protocol):
    """The worker's end of a ring: `weightlane.ring.RingReader`, or one with its slots on a GPU."""

    def begin(self, sync: int) -> None:
        """Shows the sender that this worker reads sync `sync`."""

    def beat(self) -> None:
        """Shows the sender that this process lives."""

    def take(
        self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float
    ) -> tuple[Tensor, memoryview, float]:
        """Waits for the bucket; gives its bytes, the same for a digest, and the seconds waited."""

    def release(self, layout: BucketLayout, *, sync: int) -> None:
        """Gives the slot back; every view of it must be gone."""

    def is_abandoned(self) -> bool:
        """Whether the sender has closed its end or its process is gone."""

    def fail(self, cause: str) -> None:
        """Tells the sender that this worker stopped reading its current sync, and why."""

    def close(self) -> None:
        """Lets go of everything that is mapped."""
