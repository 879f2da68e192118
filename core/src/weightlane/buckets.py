"""Bucket layouts: which tensors travel together and at which byte offsets.

Made once per plan from names, shapes and dtypes alone, so that sender and receiver share one layout and
neither recomputes it. No torch here; packing is in `weightlane.packing`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import PlanError, Problem
from weightlane.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.messages import WireTensor

ALIGNMENT = 64
"""Every offset is a multiple of this many bytes: a multiple of every dtype's size and of a cache line. An
odd-sized tensor before a wider dtype would otherwise make the dtype view fail (vLLM #57665, #40828)."""

DEFAULT_BUCKET_BYTES = 64 << 20

MOST_SLOTS = 16
"""Slots that a ring can have."""

MOST_BUCKETS = (1 << 24) - 2
"""Buckets that a sync can have: a ring's words hold the number of sync and bucket together."""


class BucketEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensor number `tensor` (index into the plan's tensors) at byte `offset` of its bucket."""

    tensor: int
    offset: int
    nbytes: int


class BucketLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket: `nbytes` long, in ring slot `slot`, holding `entries` in plan order.

    `last` marks the final bucket of a sync. A plan always has one, be it empty, so that a receiver always
    sees the end.
    """

    index: int
    slot: int
    nbytes: int
    entries: tuple[BucketEntry, ...]
    last: bool = False


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def wire_nbytes(tensor: WireTensor) -> int:
    """Bytes of a tensor as it travels."""
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def lay_out_buckets(
    tensors: Sequence[WireTensor], *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, slots: int = 2
) -> tuple[BucketLayout, ...]:
    """Packs tensors, in order, into buckets of at most `bucket_bytes` (rounded down to `ALIGNMENT`).

    A tensor above that travels alone in a bucket of its own size, in the extra slot `slots`; ordinary buckets
    take slots 0 to `slots` - 1 in turn. Below `ALIGNMENT` every tensor that has bytes travels alone.

    Raises:
        PlanError: `bucket_bytes` is not positive.
        ValueError: a ring has not that many slots and one more.
    """
    if bucket_bytes < 1:
        problem = Problem("bucket-bytes", "bucket_bytes", f"must be positive, not {bucket_bytes}")
        raise PlanError([problem])
    if not 1 <= slots < MOST_SLOTS:
        raise ValueError(f"slots must be 1 to {MOST_SLOTS - 1}, got {slots}")
    bucket_bytes -= bucket_bytes % ALIGNMENT
    pending: list[tuple[tuple[BucketEntry, ...], int, bool]] = []
    entries: list[BucketEntry] = []
    offset = 0

    def flush() -> None:
        nonlocal offset
        if entries:
            pending.append((tuple(entries), offset, False))
            entries.clear()
            offset = 0

    for number, tensor in enumerate(tensors):
        nbytes = wire_nbytes(tensor)
        if nbytes > bucket_bytes:
            flush()
            pending.append(((BucketEntry(number, 0, nbytes),), aligned(nbytes), True))
            continue
        if offset + nbytes > bucket_bytes:
            flush()
        entries.append(BucketEntry(number, offset, nbytes))
        offset += aligned(nbytes)
    flush()
    if not pending:
        pending.append(((), 0, False))
    layouts: list[BucketLayout] = []
    ordinary = 0
    for index, (content, nbytes, oversize) in enumerate(pending):
        slot = slots if oversize else ordinary % slots
        ordinary += 0 if oversize else 1
        layouts.append(BucketLayout(index, slot, nbytes, content, last=index == len(pending) - 1))
    return tuple(layouts)


def slot_sizes(layouts: Sequence[BucketLayout]) -> tuple[int, ...]:
    """Bytes that each ring slot must hold for these layouts; never empty."""
    count = max((layout.slot for layout in layouts), default=0) + 1
    sizes = [0] * count
    for layout in layouts:
        sizes[layout.slot] = max(sizes[layout.slot], layout.nbytes)
    return tuple(max(aligned(size), ALIGNMENT) for size in sizes)
