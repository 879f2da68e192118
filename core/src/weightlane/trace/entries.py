"""The name map that a trace gives: the wire name that the loader was seen to take, and where it led."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.manifest import FLOATING
from weightlane.receiver import UNKNOWN, NameEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.manifest import Manifest
    from weightlane.trace.table import Placement, PlacementTable, TracedSource

TRACED = "traced"


def entries_from_table(
    manifest: Manifest, table: PlacementTable, dropped: Mapping[str, str]
) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order.

    What travels has the receiver's dtype where the loader casts to it directly and both are floating; where
    it casts by a detour, or into targets of several dtypes, the exported dtype travels and the detour stays.

    Args:
        manifest: the agreed one.
        table: of one worker, over the manifest's tensors without the dropped ones.
        dropped: reasons by canonical name.
    """
    placed: dict[str, list[Placement]] = {source.canonical: [] for source in table.sources}
    sources = {source.canonical: source for source in table.sources}
    for item in table.placements:
        placed[table.sources[item.source].canonical].append(item)
    entries: list[NameEntry] = []
    for spec in manifest.tensors:
        source, reason = sources.get(spec.name), dropped.get(spec.name, "")
        if reason:
            entries.append(NameEntry(spec.name, spec.name, spec.dtype, rule="dropped", dropped=reason))
        elif source is None or not placed[spec.name]:
            wire = source.wire if source else spec.name
            entries.append(NameEntry(spec.name, wire, spec.dtype, rule=UNKNOWN))
        else:
            numbers = dict.fromkeys(item.target for item in placed[spec.name])
            targets = tuple(table.targets[number].name for number in numbers)
            dtype = _travelling_dtype(source, placed[spec.name])
            entries.append(
                NameEntry(spec.name, source.wire, dtype, targets, f"{TRACED}, {table.style} names")
            )
    return tuple(entries)


def _travelling_dtype(source: TracedSource, placed: list[Placement]) -> str:
    chains = {item.casts for item in placed}
    if len(chains) == 1:
        (chain,) = chains
        if len(chain) == 1 and {source.dtype, *chain} <= FLOATING:
            return chain[0]
    return source.dtype
