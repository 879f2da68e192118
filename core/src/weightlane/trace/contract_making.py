"""Makes a contract from the placement tables of all workers of one replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlane.trace.boxes import Box, Landing, landings
from weightlane.trace.contract import WHOLE, Contract, Line, Note, Place, Refused
from weightlane.trace.coverage import target_coverage
from weightlane.trace.patterns import LAYER, Numbered, alike, layers_in_words, layers_of, numbered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightlane.trace.table import PlacementTable

_AXES = ("rows", "columns")
OWN_ELEMENTS = "elements of its own"
SHARED = "the same tensor as in another layer"
UNCONSUMED = "the loader accepts it and writes it nowhere"


def contract_from_tables(tables: Sequence[PlacementTable], dropped: Mapping[str, str]) -> Contract:
    """The contract that these tables show.

    Args:
        tables: those of all workers of one replica, over the same sources; at least one.
        dropped: reasons by canonical name of sources that were left out of the trace on purpose.
    """
    key = tables[0].key
    seen = _Seen.of(tables)
    lines = _lines(tables, seen, dropped)
    return Contract(
        engine=key.engine,
        engine_version=key.engine_version,
        architecture=key.architecture,
        tensor_parallel=key.tensor_parallel,
        lora=key.lora,
        style=tables[0].style,
        lines=lines,
        owned=_notes(_owned(tables), seen),
        aliases=_notes(_aliases(tables), seen),
        uncovered=_notes(_uncovered(tables), seen),
        refused=_refused(tables),
    )


@dataclass(slots=True)
class _Seen:
    """What is looked up while lines are made; `families` are the layers by what stands before the number."""

    landed: list[dict[int, list[Landing]]]
    stacks: dict[tuple[int, int], dict[Box, None]]
    dtype: str
    families: dict[str, set[int]] = field(default_factory=dict)

    @staticmethod
    def of(tables: Sequence[PlacementTable]) -> _Seen:
        seen = _Seen([], {}, Counter(item.dtype for item in tables[0].targets).most_common(1)[0][0])
        for number, table in enumerate(tables):
            of_source: dict[int, list[Landing]] = {}
            for item in landings(table):
                of_source.setdefault(item.source, []).append(item)
                expert = numbered(table.sources[item.source].canonical).expert
                if number == 0 and item.put is not None:
                    rest = _without_slice(item, expert, table.targets[item.target].shape)
                    slot = item.put.first[0] if rest is not item.put else -1
                    seen.stacks.setdefault((item.target, slot), {})[rest] = None
            seen.landed.append(of_source)
        names = [source.canonical for source in tables[0].sources]
        names += [name for table in tables for item in table.targets for name in (item.name, *item.aliases)]
        for key in map(numbered, names):
            if key.layer is not None:
                seen.families.setdefault(key.pattern.partition(LAYER)[0], set()).add(key.layer)
        return seen

    def words(self, pattern: str, layers: Iterable[int]) -> str:
        return layers_in_words(list(layers), self.families.get(pattern.partition(LAYER)[0], set()))


def _lines(tables: Sequence[PlacementTable], seen: _Seen, dropped: Mapping[str, str]) -> tuple[Line, ...]:
    kinds: dict[Line, list[Numbered]] = {}
    first: dict[Line, tuple[int, tuple[int, ...]]] = {}
    last = (len(tables[0].targets), ())
    for number, source in enumerate(tables[0].sources):
        key = numbered(source.canonical)
        places = tuple(_places(tables, seen, number, key))
        line = Line(key.pattern, alike(source.wire, key), places=places, dropped="" if places else UNCONSUMED)
        kinds.setdefault(line, []).append(key)
        where = min(
            ((item.target, item.put.first if item.put else ()) for item in seen.landed[0].get(number, ())),
            default=last,
        )
        first[line] = min(first.get(line, where), where)
    for name, reason in dropped.items():
        key = numbered(name)
        line = Line(key.pattern, key.pattern, dropped=reason)
        kinds.setdefault(line, []).append(key)
        first[line] = last
    ordered = sorted(kinds, key=lambda line: (first[line], line.source))
    return tuple(
        Line(
            line.source, line.wire, seen.words(line.source, layers_of(kinds[line])), line.places, line.dropped
        )
        for line in ordered
    )


def _places(tables: Sequence[PlacementTable], seen: _Seen, source: int, key: Numbered) -> Iterable[Place]:
    per_worker = [landed.get(source, []) for landed in seen.landed]
    model = next((items for items in per_worker if items), [])
    if any(len(items) != len(model) for items in per_worker):
        # Not every worker takes it in as many pieces (a vocabulary that ends within one worker's share).
        per_worker = [items for items in per_worker if len(items) == len(model)]
    unions: list[Box | None] = []
    splits: list[str] = []
    for pieces in zip(*per_worker, strict=True):
        union, split = _over_workers([item.taken for item in pieces])
        unions.append(union)
        splits.append(split)
    worker = next((number for number, landed in enumerate(seen.landed) if landed.get(source)), 0)
    table = tables[worker]
    filled = {fill.target for item in tables for fill in item.fills}
    for number, item in enumerate(model):
        target = table.targets[item.target]
        yield Place(
            target=alike(target.name, key),
            where=_where(item, key.expert, target.shape, seen),
            taken=_part(unions[number], unions, table.sources[source].shape),
            split=splits[number],
            order=item.order,
            dtype="" if target.dtype == seen.dtype else target.dtype,
            via=item.casts[:-1],
            padded=item.target in filled,
        )


def _over_workers(boxes: Sequence[Box | None]) -> tuple[Box | None, str]:
    """What all workers take together, and along which dimension each has its own."""
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes):
        return None, "elements"
    distinct = sorted(dict.fromkeys(known), key=lambda box: box.first)
    axes = {axis for one in distinct[1:] for axis in distinct[0].differs_along(one)}
    if not axes:
        return distinct[0], ""
    joined = Box(distinct[0].first, distinct[-1].last)
    return joined, _AXES[min(axes)] if max(axes) < len(_AXES) and len(axes) == 1 else f"axis {min(axes)}"


def _part(box: Box | None, boxes: Sequence[Box | None], shape: Sequence[int]) -> str:
    """Which of several boxes of one source this is; "" where there is but one."""
    if box is None or (len(boxes) == 1 and box.covers(shape)):
        return "" if box is not None or len(boxes) == 1 else "elements"
    return _numbered_along(box, [item for item in boxes if item is not None], len(boxes) > 1)


def _where(item: Landing, expert: int | None, shape: Sequence[int], seen: _Seen) -> str:
    if item.put is None:
        return OWN_ELEMENTS
    rest = _without_slice(item, expert, shape)
    sliced = rest is not item.put
    slot = item.put.first[0] if sliced else -1
    stack = list(seen.stacks.get((item.target, slot), {rest: None}))
    part = "" if len(stack) == 1 else _numbered_along(rest, stack, True)
    words = ["slice {expert}" if slot == expert else "a slice of the worker's own"] if sliced else []
    return " ".join([*words, *([part] if part else [])]) or WHOLE


def _without_slice(item: Landing, expert: int | None, shape: Sequence[int]) -> Box:
    """The box within the slice of one expert, where a target has one slice for each."""
    if item.put is None:
        raise AssertionError("asked of boxes alone")
    inner = len(item.taken.first) if item.taken is not None else len(shape)
    sliced = expert is not None and len(shape) > inner and item.put.sizes[0] == 1
    return Box(item.put.first[1:], item.put.last[1:]) if sliced else item.put


def _numbered_along(box: Box, boxes: Sequence[Box], several: bool) -> str:
    axes = {axis for other in boxes for axis in box.differs_along(other)}
    if not several or len(axes) != 1:
        return "a part"
    (axis,) = axes
    ordered = sorted({item.first[axis] for item in boxes})
    word = _AXES[axis] if axis < len(_AXES) else f"axis {axis}"
    return f"{word} {ordered.index(box.first[axis]) + 1} of {len(ordered)}"


def _owned(tables: Sequence[PlacementTable]) -> Iterable[tuple[str, str]]:
    for table in tables:
        touched = {item.target for item in table.placements}
        for number, target in enumerate(table.targets):
            if target.owned and number not in touched:
                # Layers may share one, which is then a second name of the first layer's.
                yield from ((name, target.owned) for name in (target.name, *target.aliases))


def _aliases(tables: Sequence[PlacementTable]) -> Iterable[tuple[str, str]]:
    for table in tables:
        touched = {item.target for item in table.placements}
        for target in (item for number, item in enumerate(table.targets) if number in touched):
            key = numbered(target.name)
            for name in target.aliases:
                shared = numbered(name).pattern == key.pattern
                yield target.name, SHARED if shared else alike(name, key)


def _uncovered(tables: Sequence[PlacementTable]) -> Iterable[tuple[str, str]]:
    for table in tables:
        for item in target_coverage(table):
            if not item.complete:
                what = "partly written more than once" if item.more else "partly written by nothing"
                yield item.target.name, what if item.once or item.more else "written by nothing"


def _notes(found: Iterable[tuple[str, str]], seen: _Seen) -> tuple[Note, ...]:
    kinds: dict[Note, dict[Numbered, None]] = {}
    for name, what in found:
        key = numbered(name)
        kinds.setdefault(Note(key.pattern, what), {})[key] = None
    return tuple(
        Note(note.target, note.what, seen.words(note.target, layers_of(keys))) for note, keys in kinds.items()
    )


def _refused(tables: Sequence[PlacementTable]) -> tuple[Refused, ...]:
    found: dict[Refused, None] = {}
    for table in tables:
        for item in table.obstacles:
            patterns = dict.fromkeys(numbered(name).pattern for name in (*item.sources, *item.targets))
            found[Refused(item.kind, item.operator, tuple(patterns))] = None
    return tuple(found)
