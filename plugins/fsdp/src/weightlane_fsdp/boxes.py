"""Which part of a tensor each rank holds, from shapes alone: no torch, no communication."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """What one rank holds: `size` elements a dimension, from `start`."""

    rank: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of a mesh that cuts dimension `dim` of the tensor.

    `split_factor` is above 1 where dimensions of the mesh on its right cut the tensor before it does, as FSDP
    over tensor parallel does: the product of their sizes.
    """

    dim: int
    split_factor: int = 1


class UnknownOrderError(ValueError):
    """A split factor that no dimensions of the mesh on the right make up."""


def boxes_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    rank_at: Mapping[tuple[int, ...], int],
    cuts: Mapping[int, Cut],
    here: tuple[int, ...],
) -> tuple[Box, ...]:
    """The parts of all ranks that together hold the tensor once, by rank; `here` is among them.

    Args:
        shape: the whole tensor's.
        mesh_shape: sizes of the mesh's dimensions.
        rank_at: global rank by coordinate.
        cuts: by dimension of the mesh; a dimension that is not there replicates.
        here: this rank's coordinate. Ranks that replicate it are left out.
    """
    order = {dim: _order(dim, mesh_shape, cuts) for dim in {cut.dim for cut in cuts.values()}}
    axes = [range(size) if axis in cuts else (here[axis],) for axis, size in enumerate(mesh_shape)]
    found = []
    for coordinate in itertools.product(*axes):
        start, size = [0] * len(shape), list(shape)
        for dim, axes_of_dim in order.items():
            for axis in axes_of_dim:
                first, size[dim] = chunk(size[dim], mesh_shape[axis], coordinate[axis])
                start[dim] += first
        found.append(Box(rank_at[coordinate], tuple(start), tuple(size)))
    return tuple(sorted(found, key=lambda box: box.rank))


def chunk(length: int, parts: int, number: int) -> tuple[int, int]:
    """Start and length of one of `parts` chunks, as `torch.chunk` cuts them; the last ones may be empty."""
    each = -(-length // parts)
    start = min(number * each, length)
    return start, min(each, length - start)


def _order(dim: int, mesh_shape: Sequence[int], cuts: Mapping[int, Cut]) -> list[int]:
    """Dimensions of the mesh that cut `dim`, the one that cuts first at the front."""
    order: list[int] = []
    for axis in sorted((axis for axis, cut in cuts.items() if cut.dim == dim), reverse=True):
        ahead = place = 0
        product = 1
        while product < cuts[axis].split_factor and place < len(order):
            product *= mesh_shape[order[place]]
            place += 1
        ahead = product
        if ahead != cuts[axis].split_factor:
            raise UnknownOrderError(f"split factor {cuts[axis].split_factor} over a mesh {tuple(mesh_shape)}")
        order.insert(place, axis)
    return order
