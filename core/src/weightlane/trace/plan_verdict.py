"""What the tables of one replica prove or refuse of a plan; what other checks name is not said again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.errors import Problem
from weightlane.manifest import FLOATING
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.groups import incomplete_groups, packed_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from weightlane.manifest import Manifest
    from weightlane.receiver import NameEntry
    from weightlane.trace.table import PlacementTable

_MOST_NAMED = 20


def table_problems(
    tables: Sequence[PlacementTable],
    manifest: Manifest,
    entries: Sequence[NameEntry],
    *,
    receiver: str,
    named: Collection[str],
) -> list[Problem]:
    """Problems of one replica's plan; none means that its coverage is proven.

    Args:
        tables: one per worker, about the sources of `asking.sources_to_trace`.
        manifest: the agreed one.
        entries: how the plugin maps it.
        receiver: how messages call the replica.
        named: what other checks have found missing, unknown or of another shape.
    """
    differing = _style_problems(tables, receiver) or _wire_problems(tables, entries, receiver)
    if differing:
        return differing
    dropped = {entry.canonical: entry.dropped for entry in entries if entry.dropped}
    sent = {entry.canonical for entry in entries if not entry.dropped}
    found = coverage_problems([_without(table, dropped) for table in tables], dropped, receiver=receiver)
    ended = [problem for problem in found if problem.kind in ("trace-error", "trace-untraceable")]
    if ended:
        # The loader stopped there: what it was never handed says nothing.
        return [problem for problem in found if problem.kind.startswith("trace-")]
    # A tensor that is left out is not consumed; one of its name that nothing writes is told nevertheless.
    known = {"unconsumed": {*named, *dropped}, "uncovered": {*named}}
    return [
        *(problem for problem in found if problem.subject not in known.get(problem.kind, ())),
        *_cast_problems(tables, manifest, receiver),
        *incomplete_groups(packed_groups(tables), sent, receiver=receiver),
    ]


def _style_problems(tables: Sequence[PlacementTable], receiver: str) -> list[Problem]:
    styles = {table.key.worker: table.style for table in tables}
    if len(set(styles.values())) < 2:
        return []
    told = ", ".join(f"worker {worker} {style} names" for worker, style in styles.items())
    what = f"the workers of {receiver} do not take the same names: {told}"
    return [Problem("map-names", "names", what, "Start all workers of an engine alike.")]


def _wire_problems(
    tables: Sequence[PlacementTable], entries: Sequence[NameEntry], receiver: str
) -> list[Problem]:
    """Names that would travel otherwise than they were traced: then the table proves nothing of them."""
    problems: list[Problem] = []
    for table in tables:
        wires = {source.canonical: source.wire for source in table.sources}
        problems += [
            Problem(
                "map-names",
                entry.canonical,
                f"it would be sent to {receiver} as {entry.wire}, but its loader was seen to take "
                f"{wires[entry.canonical]}",
                "Report this to the engine's plugin.",
            )
            for entry in entries
            if not entry.dropped and wires.get(entry.canonical, entry.wire) != entry.wire
        ]
    return list(dict.fromkeys(problems))[:_MOST_NAMED]


def _without(table: PlacementTable, dropped: Mapping[str, str]) -> PlacementTable:
    """The table as if what a plugin drops had not been handed to the loader."""
    gone = {number for number, source in enumerate(table.sources) if source.canonical in dropped}
    if not gone:
        return table
    return replace(table, placements=tuple(item for item in table.placements if item.source not in gone))


def _cast_problems(tables: Sequence[PlacementTable], manifest: Manifest, receiver: str) -> list[Problem]:
    """Casts between kinds, which a loader makes without a word and which change values."""
    exported = {spec.name for spec in manifest.tensors}
    found: dict[Problem, None] = {}
    for table in tables:
        for item in table.placements:
            source = table.sources[item.source]
            if item.casts and source.canonical in exported and not {source.dtype, *item.casts} <= FLOATING:
                what = (
                    f"exported as {source.dtype}, but the loader of {receiver} casts it to "
                    f"{', then '.join(item.casts)} for {table.targets[item.target].name}; only casts between "
                    "float64, float32, float16 and bfloat16 are made"
                )
                found[Problem("dtype", source.canonical, what)] = None
    return list(found)
