"""What every transport offers to a trainer rank: a place to put buckets in plan order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.messages import WireTensor


@dataclass(frozen=True, slots=True)
class SinkBounds:
    """How long a sink waits, and what it looks at while waiting; `check` raises to end the wait."""

    bucket_seconds: float
    lost_after: float
    check: Callable[[], None]


class Sink(Protocol):
    """One receiver's end as seen from a rank. Methods are called from the rank's main thread."""

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:
        """Opens a sync."""

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Takes one bucket; the tensors may change as soon as this returns."""

    def finish(self) -> str:
        """Waits until the receiver has taken everything; gives the digest of what was put ("" for none)."""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Tells the receiver that no more of `sync` comes (default: of the one begun last). Never raises."""

    def close(self) -> None:
        """Frees what the sink holds. Idempotent."""


def cast_for_wire(tensor: Tensor, wire: WireTensor) -> Tensor:
    """The tensor as a detached contiguous CPU tensor of the travelling dtype; no copy where it is one."""
    from weightlane.packing import torch_dtype

    ready = tensor.detach().to(device="cpu", dtype=torch_dtype(wire.dtype))
    return ready.resolve_conj().resolve_neg().contiguous()
