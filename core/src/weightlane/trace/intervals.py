"""Interval algebra: how often each element of a range is covered by strided regions.

Neighbours are joined first: the halves of a row-parallel weight, or gate and up rows that alternate, become
one run that way. Only what is left in pieces (an element missing in each row) is compared run by run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.trace.geometry import Region, coalesce

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_MOST_RUNS = 1 << 22


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements of a range that are covered once, never, and more than once."""

    once: int
    never: int
    more: int

    @property
    def covered(self) -> int:
        """Once or more."""
        return self.once + self.more


class TooFineError(ValueError):
    """The regions of one range are made of more runs than can be counted."""


def count(regions: Sequence[Region], within: Sequence[Region]) -> Counts:
    """How often the elements of `within` are covered by `regions`.

    Args:
        regions: what covers; may overlap.
        within: the elements that matter; overlaps count once. Coverage outside of it is not counted.

    Raises:
        TooFineError: they are made of more than 4 million runs.
    """
    covering = _joined([region for region in regions if region.elements])
    wanted = _joined([region for region in within if region.elements])
    runs = sum(region.elements // region.axes[-1][0] for region in (*covering, *wanted))
    if runs > _MOST_RUNS:
        raise TooFineError(f"{runs} runs")
    return _sweep(_events(covering, 1), _events(_without_overlap(wanted), _INSIDE))


def tile(runs: list[tuple[int, int]], within: Region) -> bool:
    """Whether runs (first, length) follow one another through all of `within`: the usual case, decided fast.

    False says nothing.
    """
    whole = coalesce(within.axes)
    if len(whole) != 1 or whole[0][1] != 1 or within.elements != whole[0][0]:
        return False
    place = within.offset
    for first, length in sorted(runs):
        if first != place:
            return False
        place += length
    return place == within.offset + whole[0][0]


_INSIDE = 1 << 40  # added to the depth of elements that matter; no range is covered so often


def _explicit(region: Region) -> Region:
    """Coalesced, and with an innermost axis of stride 1, be it of size 1."""
    if len(region.axes) == 1 and region.axes[0][1] == 1:
        return region
    axes = coalesce(region.axes)
    return Region(region.offset, axes if axes and axes[-1][1] == 1 else (*axes, (1, 1)))


def _joined(regions: Iterable[Region]) -> list[Region]:
    """The same elements, equally often, in fewer regions: those that continue one another are one."""
    current = [_explicit(region) for region in regions]
    while True:
        depth = max((len(region.axes) for region in current), default=0)
        before = len(current)
        for position in range(depth):  # counted from the innermost
            current = _joined_along(current, position)
        if len(current) == before:
            return current


def _joined_along(regions: list[Region], position: int) -> list[Region]:
    alike: dict[object, list[Region]] = {}
    rest: list[Region] = []
    for region in regions:
        if position >= len(region.axes):
            rest.append(region)
            continue
        axis = len(region.axes) - 1 - position
        key = (region.axes[:axis], region.axes[axis][1], region.axes[axis + 1 :])
        alike.setdefault(key, []).append(region)
    for family in alike.values():
        rest += _chained(family, position) if len(family) > 1 else family
    return rest


def _chained(family: list[Region], position: int) -> list[Region]:
    family.sort(key=lambda region: region.offset)
    axis = len(family[0].axes) - 1 - position
    stride = family[0].axes[axis][1]
    before, after = family[0].axes[:axis], family[0].axes[axis + 1 :]
    chains: list[tuple[int, int]] = []
    open_ends: dict[int, int] = {}  # where a chain would go on: its number
    for region in family:
        size = region.axes[axis][0]
        number = open_ends.pop(region.offset, None)
        if number is None:
            number = len(chains)
            chains.append((region.offset, size))
        else:
            chains[number] = (chains[number][0], chains[number][1] + size)
        first, length = chains[number]
        open_ends[first + length * stride] = number
    return [_explicit(Region(first, (*before, (length, stride), *after))) for first, length in chains]


def _runs(region: Region) -> Iterator[tuple[int, int]]:
    """(first, one past last) of every run."""
    length = region.axes[-1][0]
    starts = [region.offset]
    for size, stride in region.axes[:-1]:
        starts = [start + number * stride for start in starts for number in range(size)]
    return ((start, start + length) for start in starts)


def _without_overlap(regions: list[Region]) -> list[Region]:
    if len(regions) == 1 and apart(regions[0]):
        return regions
    merged: list[tuple[int, int]] = []
    for first, last in sorted(run for region in regions for run in _runs(region)):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return [Region(first, ((last - first, 1),)) for first, last in merged]


def apart(region: Region) -> bool:
    """Whether each step goes beyond all that the inner axes reach, so that no element comes twice."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in region.axes if size != 1):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def _events(regions: Sequence[Region], weight: int) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []
    for region in regions:
        for first, last in _runs(region):
            events.append((first, weight))
            events.append((last, -weight))
    return events


def _sweep(covering: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> Counts:
    events = sorted((*covering, *wanted))
    totals = [0, 0, 0]
    depth = position = 0
    for place, change in events:
        if place > position and depth >= _INSIDE:
            totals[min(depth - _INSIDE, 2)] += place - position
        position = place
        depth += change
    return Counts(once=totals[1], never=totals[0], more=totals[2])
