"""Groups: sources that share a receiver tensor and must travel in one load.

A reload path makes a packed layer anew from what it is given: q alone leaves k and v as they happen to be in
fresh memory, without an error (seen on vLLM 0.32: log-probs off by 1.14 nats).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from weightlane.trace.table import PlacementTable

_MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A receiver tensor and the canonical names of all sources that it is made of; two or more."""

    target: str
    sources: tuple[str, ...]


def packed_groups(tables: Sequence[PlacementTable]) -> tuple[PackedGroup, ...]:
    """Groups over all workers of one replica, each once, in the order of the targets."""
    found: dict[str, dict[str, None]] = {}
    for table in tables:
        for item in table.placements:
            members = found.setdefault(table.targets[item.target].name, {})
            members[table.sources[item.source].canonical] = None
    return tuple(PackedGroup(target, tuple(members)) for target, members in found.items() if len(members) > 1)


def incomplete_groups(
    groups: Sequence[PackedGroup], sent: Collection[str], *, receiver: str
) -> list[Problem]:
    """One problem per group of which some, and not all, are sent."""
    problems: list[Problem] = []
    for group in groups:
        missing = [name for name in group.sources if name not in sent]
        if missing and len(missing) < len(group.sources):
            first = next(name for name in group.sources if name in sent)
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            problems.append(
                Problem(
                    "incomplete-group",
                    first,
                    f"{receiver} packs it into {group.target} together with "
                    f"{', '.join(missing[:_MOST_NAMED])}{more}, which are not sent",
                    "Send the whole group in one sync.",
                )
            )
    return problems
