"""Coverage: every receiver element written once, every source consumed, or a reason why not."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from weightlane.errors import MOST_WITH_NEAR_NAMES, Problem, near_names
from weightlane.trace.geometry import Region
from weightlane.trace.intervals import TooFineError, apart, count, tile
from weightlane.trace.obstacle_problems import obstacle_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.trace.geometry import JointAxes
    from weightlane.trace.table import Placement, PlacementTable, TracedTarget

_Placed: TypeAlias = "tuple[int, JointAxes]"
"""First element in the target's storage, and the axes of a placement there."""


@dataclass(frozen=True, slots=True)
class TargetCoverage:
    """Elements of one receiver tensor: written once, filled with a constant alone, never, more than once.

    `owned` says why it need not be written, `too_fine` that its layout could not be counted.
    """

    target: TracedTarget
    once: int
    filled: int
    never: int
    more: int
    too_fine: bool = False

    @property
    def complete(self) -> bool:
        """Every element once, or padding; or left to the engine as a whole."""
        untouched = not (self.once or self.more or self.filled)
        whole = not (self.never or self.more or self.too_fine)
        return whole or bool(self.target.owned and untouched)


@dataclass(frozen=True, slots=True)
class SourceCoverage:
    """How many elements of one checkpoint tensor reach a receiver, over all workers together."""

    canonical: str
    wire: str
    elements: int
    consumed: int


def target_coverage(table: PlacementTable) -> tuple[TargetCoverage, ...]:
    """One entry per target of one worker, in the table's order; targets that share memory are seen as one."""
    placed: dict[int, list[_Placed]] = defaultdict(list)
    filled: dict[int, list[Region]] = defaultdict(list)
    places = [(placed[target.storage], target.offset) for target in table.targets]
    for item in table.placements:
        items, offset = places[item.target]
        items.append((offset + item.target_offset, item.axes))
    for fill in table.fills:
        target = table.targets[fill.target]
        filled[target.storage].append(Region(target.offset + fill.offset, fill.axes))
    sharing = Counter(target.storage for target in table.targets)
    for storage, fills in filled.items():
        if sharing[storage] > 1:  # which came first is not known here, so a fill counts as one more write
            placed[storage] += [
                (fill.offset, tuple((size, 0, step) for size, step in fill.axes)) for fill in fills
            ]
    return tuple(_covered(target, placed[target.storage], filled[target.storage]) for target in table.targets)


def _covered(target: TracedTarget, placed: list[_Placed], filled: list[Region]) -> TargetCoverage:
    whole = Region(target.offset, tuple(zip(target.shape, target.stride, strict=True)))
    runs = [(first, axes[0][0]) for first, axes in placed if len(axes) == 1 and axes[0][2] == 1]
    if len(runs) == len(placed) and not filled and tile(runs, whole):
        return TargetCoverage(target, target.elements, 0, 0, 0)
    regions = [Region(first, tuple((size, step) for size, _, step in axes)) for first, axes in placed]
    try:
        counts = count(regions, [whole])
        padding = count([*regions, *filled], [whole]).covered - counts.covered if filled else 0
    except TooFineError:
        return TargetCoverage(target, 0, 0, target.elements, 0, too_fine=True)
    return TargetCoverage(target, counts.once, padding, counts.never - padding, counts.more)


def source_coverage(tables: Sequence[PlacementTable]) -> tuple[SourceCoverage, ...]:
    """One entry per source, in the tables' order. `tables` are those of all workers of one replica.

    A layout too fine to be counted is given as not consumed at all.
    """
    return tuple(
        SourceCoverage(source.canonical, source.wire, source.elements, consumed)
        for source, consumed in zip(tables[0].sources, _consumed(tables), strict=True)
    )


def _consumed(tables: Sequence[PlacementTable]) -> list[int]:
    """Elements of each source that reach a receiver."""
    first: list[Placement | None] = [None] * len(tables[0].sources)
    more: dict[int, list[Placement]] = {}
    for table in tables:
        for item in table.placements:
            number = item.source
            if first[number] is None:
                first[number] = item
            else:
                more.setdefault(number, []).append(item)
    once: dict[JointAxes, int | None] = {}  # experts are taken alike by the thousand
    consumed: list[int] = []
    for number, taken in enumerate(first):
        if taken is None:
            consumed.append(0)
            continue
        alone: int | None = None
        if number not in more:
            if taken.axes not in once:
                region = _taken(taken)
                once[taken.axes] = region.elements if apart(region) else None
            alone = once[taken.axes]
        if alone is None:
            elements = tables[0].sources[number].elements
            alone = _counted([taken, *more.get(number, ())], elements)
        consumed.append(alone)
    return consumed


def _counted(items: Sequence[Placement], elements: int) -> int:
    try:
        return count([_taken(item) for item in items], [Region(0, ((elements, 1),))]).covered
    except TooFineError:
        return 0


def _taken(item: Placement) -> Region:
    return Region(item.source_offset, tuple((size, stride) for size, stride, _ in item.axes))


def coverage_problems(
    tables: Sequence[PlacementTable], dropped: Mapping[str, str], *, receiver: str
) -> list[Problem]:
    """What keeps a plan from being proven: all of it, once.

    Args:
        tables: those of all workers of one replica, with the same sources.
        dropped: reasons by canonical name of sources that are left out of the sync on purpose; they must
            not be among the tables' sources.
        receiver: how messages call the replica.
    """
    problems = [obstacle_problem(item, receiver) for table in tables for item in table.obstacles]
    lost = [
        SourceCoverage(source.canonical, source.wire, source.elements, consumed)
        for source, consumed in zip(tables[0].sources, _consumed(tables), strict=True)
        if consumed < source.elements
    ]
    blocked = {name for table in tables for item in table.obstacles for name in item.sources}
    for number, source in enumerate(item for item in lost if item.canonical not in blocked):
        problems.append(_unconsumed(source, tables, receiver, with_near=number < MOST_WITH_NEAR_NAMES))
    stopped = {name for table in tables for item in table.obstacles for name in item.targets}
    names = [item.canonical for item in lost] + list(dropped)
    for table in tables:
        where = f"{receiver}, worker {table.key.worker}" if len(tables) > 1 else receiver
        incomplete = [item for item in target_coverage(table) if not item.complete]
        for number, target in enumerate(incomplete):
            if target.target.name not in stopped:
                near = near_names(target.target.name, names) if number < MOST_WITH_NEAR_NAMES else ()
                problems.append(_incomplete(target, table, where, near))
    return list(dict.fromkeys(problems))


_REPORT = "{}; report the architecture."


def _unconsumed(
    source: SourceCoverage, tables: Sequence[PlacementTable], receiver: str, *, with_near: bool
) -> Problem:
    sent = f" (sent as {source.wire})" if source.wire != source.canonical else ""
    if source.consumed:
        what = f"{receiver} takes {source.consumed} of its {source.elements} elements{sent}"
        fix = _REPORT.format("The others would be lost, so it is not sent")
    else:
        what = f"the loader of {receiver} accepts it and writes it nowhere{sent}"
        fix = (
            "Leave it out of the export if the engine has no use for it; else start the engine so that it "
            "has (as with LoRA off), or report the architecture."
        )
    targets = [target.name for target in tables[0].targets]
    near = near_names(source.canonical, targets) if with_near else ()
    return Problem("unconsumed", source.canonical, what, fix, near)


def _incomplete(item: TargetCoverage, table: PlacementTable, where: str, near: tuple[str, ...]) -> Problem:
    target = item.target
    number = table.targets.index(target)
    from_names = [table.sources[p.source].canonical for p in table.placements if p.target == number]
    given = f"; it is given {', '.join(dict.fromkeys(from_names[:6]))}" if from_names else ""
    if item.too_fine:
        what = f"the layout in which {where} is written is too fine to be counted"
        fix = _REPORT.format("Whether all of it is written cannot be told")
    elif item.more:
        what = f"{item.more} of its {target.elements} elements would be written more than once in {where}"
        fix = "Leave out all but one of what is exported for it, or report the architecture."
    else:
        what = f"{item.never} of its {target.elements} elements would be written by nothing in {where}"
        fix = (
            "Export what belongs there under its checkpoint name, so that no old values stay, or report "
            "the architecture."
        )
    return Problem("uncovered", target.name, what + given, fix, near)
