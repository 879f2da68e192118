"""Element numbers: how rearrangements are followed that no view can express. Real int64 tensors."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightlane.trace.geometry import extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_MOST_ELEMENTS = 1 << 28  # 2 GiB of numbers


class TooManyElementsError(ValueError):
    """Numbering the elements would take more memory than a trace may."""


@dataclass(frozen=True, slots=True)
class Run:
    """`length` elements from element `first` of a source to element `target` of the target's storage."""

    source: int
    first: int
    target: int
    length: int


class ElementNumbers:
    """Numbers the elements of all sources in one row; `sizes` are their elements."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *itertools.accumulate(sizes)]

    def of(self, source: int, geometry: Tensor) -> Tensor:
        """The number of each element of a view of the source; one that holds numbers already stays.

        Raises:
            TooManyElementsError: more than 2**28.
        """
        if not geometry.is_meta:
            return geometry
        if geometry.numel() > _MOST_ELEMENTS:
            raise TooManyElementsError(f"{geometry.numel()} elements")
        numbers = torch.full(geometry.shape, self._starts[source] + int(geometry.storage_offset()))
        for axis, (size, stride) in enumerate(zip(geometry.shape, geometry.stride(), strict=True)):
            along = [1] * geometry.dim()
            along[axis] = size
            numbers += (torch.arange(size) * stride).reshape(along)
        return numbers

    def runs(self, numbers: Tensor, view: Tensor) -> Iterator[Run]:
        """Elements that go together: consecutive in their source and in the storage of `view`."""
        if not view.numel():
            return
        reach = int(view.storage_offset()) + extent(view.shape, view.stride())
        places = torch.arange(reach).as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)
        flat = numbers.expand(view.shape).reshape(-1)
        cuts = torch.nonzero((flat[1:] != flat[:-1] + 1) | (places[1:] != places[:-1] + 1)).flatten() + 1
        borders = torch.tensor(self._starts[1:-1])
        inside = torch.searchsorted(borders, flat, right=True)
        cuts = torch.unique(torch.cat((cuts, torch.nonzero(inside[1:] != inside[:-1]).flatten() + 1)))
        edges = [0, *cuts.tolist(), flat.numel()]
        for begin, end in itertools.pairwise(edges):
            source = bisect.bisect_right(self._starts, int(flat[begin])) - 1
            first = int(flat[begin]) - self._starts[source]
            yield Run(source, first, int(places[begin]), end - begin)
