"""Strided regions: canonical form of a joint one, and its runs. Plain integers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

JointAxes: TypeAlias = tuple[tuple[int, int, int], ...]
"""(size, source stride, target stride), outermost first in the target."""

Axes: TypeAlias = tuple[tuple[int, int], ...]
"""(size, stride), outermost first."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements at `offset` + sums of multiples of the strides."""

    offset: int
    axes: Axes

    @property
    def elements(self) -> int:
        """How many, with repeats where a stride is 0."""
        return math.prod(size for size, _ in self.axes)


def coalesce_joint(
    sizes: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int]
) -> JointAxes:
    """The fewest axes that walk source and target alike: axes of size 1 go, contiguous neighbours join."""
    axes = [axis for axis in zip(sizes, source_strides, target_strides, strict=True) if axis[0] != 1]
    axes.sort(key=lambda axis: -axis[2])
    joined: list[tuple[int, int, int]] = []
    for size, source, target in axes:
        if joined:
            outer_size, outer_source, outer_target = joined[-1]
            if outer_source == size * source and outer_target == size * target:
                joined[-1] = (outer_size * size, source, target)
                continue
        joined.append((size, source, target))
    return tuple(joined)


def coalesce(axes: Sequence[tuple[int, int]]) -> Axes:
    """The same for one side; an axis of stride 0 repeats what is there already and goes too."""
    if any(size == 0 for size, _ in axes):
        return ((0, 1),)
    kept = sorted((axis for axis in axes if axis[0] != 1 and axis[1] != 0), key=lambda axis: -axis[1])
    joined: list[tuple[int, int]] = []
    for size, stride in kept:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both included; 0 for a tensor without elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
