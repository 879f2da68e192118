"""Where a placement lies, as a box: from which row to which, of which columns. Plain integers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.trace.geometry import coalesce_joint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightlane.trace.table import Placement, PlacementTable

SAME_ORDER, TRANSPOSED, REARRANGED = "", "transposed", "rearranged"


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a tensor from `first` to `last` along each dimension, both included."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many along each dimension."""
        return tuple(last - first + 1 for first, last in zip(self.first, self.last, strict=True))

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether it is a whole tensor of this shape."""
        return self.sizes == tuple(shape)

    def differs_along(self, other: Box) -> tuple[int, ...]:
        """The dimensions in which two boxes do not have the same range."""
        return tuple(
            axis
            for axis in range(len(self.first))
            if (self.first[axis], self.last[axis]) != (other.first[axis], other.last[axis])
        )


@dataclass(frozen=True, slots=True)
class Landing:
    """A box of a source that becomes a box of a target; None where its elements fill no box.

    `order` is how the elements of the one follow in the other; `casts` are those of the placement.
    """

    source: int
    target: int
    taken: Box | None
    put: Box | None
    order: str
    casts: tuple[str, ...]


def landings(table: PlacementTable) -> tuple[Landing, ...]:
    """One per placement of a table, those that continue one another as one, in the order of the targets."""
    found: dict[tuple[int, int], list[Landing]] = {}
    for item in table.placements:
        found.setdefault((item.target, item.source), []).append(_landing(table, item))
    return tuple(item for pair in found.values() for item in _joined(pair))


def _landing(table: PlacementTable, item: Placement) -> Landing:
    source, target = table.sources[item.source], table.targets[item.target]
    steps = _contiguous(source.shape)
    taken = _box(source.shape, steps, item.source_offset, ((size, a) for size, a, _ in item.axes))
    put = _box(target.shape, target.stride, item.target_offset, ((size, b) for size, _, b in item.axes))
    order = REARRANGED
    if taken is not None and put is not None:
        order = _order(item, (taken, steps), (put, target.stride))
    return Landing(item.source, item.target, taken, put, order, item.casts)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _box(
    shape: Sequence[int], strides: Sequence[int], offset: int, axes: Iterable[tuple[int, int]]
) -> Box | None:
    every = list(axes)
    if 0 in shape:
        return None
    first = _place(shape, strides, offset)
    last = _place(shape, strides, offset + sum((size - 1) * step for size, step in every))
    if first is None or last is None or any(a > b for a, b in zip(first, last, strict=True)):
        return None
    box = Box(first, last)
    return box if math.prod(box.sizes) == math.prod(size for size, _ in every) else None


def _place(shape: Sequence[int], strides: Sequence[int], offset: int) -> tuple[int, ...] | None:
    """The coordinates of an offset; None where strides overlap."""
    place = [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if shape[axis] > 1 and strides[axis] > 0:
            place[axis] = min(offset // strides[axis], shape[axis] - 1)
            offset -= place[axis] * strides[axis]
    return None if offset else tuple(place)


def _order(item: Placement, taken: tuple[Box, Sequence[int]], put: tuple[Box, Sequence[int]]) -> str:
    mine = [pair for pair in zip(taken[0].sizes, taken[1], strict=True) if pair[0] != 1]
    theirs = [pair for pair in zip(put[0].sizes, put[1], strict=True) if pair[0] != 1]
    for order, pairs in ((SAME_ORDER, mine), (TRANSPOSED, mine[::-1])):
        if [size for size, _ in pairs] == [size for size, _ in theirs]:
            sizes = [size for size, _ in pairs]
            axes = coalesce_joint(sizes, [step for _, step in pairs], [step for _, step in theirs])
            if axes == item.axes:
                return order
    return REARRANGED


def _joined(pair: list[Landing]) -> list[Landing]:
    """Landings of one source in one target, neighbours on both sides joined."""
    joined: list[Landing] = []
    for item in pair:
        merged = _merge(joined[-1], item) if joined else None
        if merged is None:
            joined.append(item)
        else:
            joined[-1] = merged
    return joined


def _merge(one: Landing, other: Landing) -> Landing | None:
    alike = (one.order, one.casts) == (other.order, other.casts) and one.order == SAME_ORDER
    if not alike or one.taken is None or one.put is None or other.taken is None or other.put is None:
        return None
    taken, put = _beside(one.taken, other.taken), _beside(one.put, other.put)
    if taken is None or put is None or _thick(taken) != _thick(put):
        return None
    return Landing(one.source, one.target, taken, put, one.order, one.casts)


def _thick(box: Box) -> list[int]:
    """The sizes that are not 1: alike where two boxes have their elements in the same order."""
    return [size for size in box.sizes if size != 1]


def _beside(one: Box, other: Box) -> Box | None:
    """Both as one box, if the other goes on where the first ends along one dimension."""
    axes = one.differs_along(other)
    if len(axes) != 1 or other.first[axes[0]] != one.last[axes[0]] + 1:
        return None
    return Box(one.first, other.last)
