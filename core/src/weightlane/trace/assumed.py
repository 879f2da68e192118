"""A plan's name map from a contract, for an engine that cannot be entered: assumed, never proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import MOST_WITH_NEAR_NAMES, Problem, near_names
from weightlane.manifest import FLOATING
from weightlane.receiver import UNKNOWN, NameEntry
from weightlane.trace.patterns import fill, meant_by, numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.manifest import Manifest
    from weightlane.trace.contract import Contract

ASSUMED = "assumed"
_MOST_NAMED = 6


def assumed_from(contract: Contract) -> str:
    """What a plan says after the word `assumed`."""
    return f"from the snapshot of {contract.title}"


def assumed_entries(
    contract: Contract, manifest: Manifest, dropped: Mapping[str, str], *, dtype: str = ""
) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order; a name of no pattern has rule `unknown`.

    Args:
        contract: of this very engine, version, architecture, parallelism and LoRA.
        manifest: the agreed one.
        dropped: reasons by canonical name of what is not to be sent (tied heads).
        dtype: what the engine says that its model has, "" where it does not tell. It travels where the
            contract names no other, and both are floating.
    """
    entries: list[NameEntry] = []
    for spec in manifest.tensors:
        found = contract.line_of(spec.name)
        if spec.name in dropped:
            reason = dropped[spec.name]
            entries.append(NameEntry(spec.name, spec.name, spec.dtype, rule="dropped", dropped=reason))
        elif found is None or not found[0].places:
            entries.append(NameEntry(spec.name, spec.name, spec.dtype, rule=UNKNOWN))
        else:
            line, key = found
            wanted = {place.dtype or dtype or spec.dtype for place in line.places}
            direct = len(wanted) == 1 and not any(place.via for place in line.places)
            travels = wanted.pop() if direct and {*wanted, spec.dtype} <= FLOATING else spec.dtype
            targets = tuple(dict.fromkeys(fill(place.target, key) for place in line.places))
            wire = fill(line.wire, key)
            entries.append(NameEntry(spec.name, wire, travels, targets, f"{ASSUMED}, {contract.style} names"))
    return tuple(entries)


def assumed_problems(contract: Contract, entries: Sequence[NameEntry], *, receiver: str) -> list[Problem]:
    """What speaks against a plan from a contract: names of no pattern, torn groups, what its loader refused.

    Args:
        contract: the snapshot.
        entries: what `assumed_entries` gave for it.
        receiver: how messages call the replica.
    """
    said = f"the snapshot of {contract.title}"
    problems = [
        Problem(
            "snapshot",
            ", ".join(item.names[:_MOST_NAMED]) or contract.architecture,
            f"{said} says that the loader of {receiver} does not place it plainly: {item.kind}"
            + (f" by {item.operator}" if item.operator else ""),
            "Where its elements land cannot be told; use an engine that can be entered, or leave it out.",
        )
        for item in contract.refused
    ]
    unknown = [entry.canonical for entry in entries if entry.rule == UNKNOWN]
    patterns = [line.source for line in contract.lines]
    for number, name in enumerate(unknown):
        found = contract.line_of(name)
        if found is not None:
            what = f"{said} says of it: {found[0].dropped}"
            fix = "Leave it out of the export, or use an engine that can be entered and asked."
            problems.append(Problem("unconsumed", name, what, fix))
            continue
        key = numbered(name)
        near = near_names(key.pattern, patterns) if number < MOST_WITH_NEAR_NAMES else ()
        filled = tuple(fill(pattern, key) for pattern in near)
        problems.append(Problem("extra-name", name, f"{said} has no such name", near=filled))
    return problems + _torn_groups(contract, entries, receiver)


def _torn_groups(contract: Contract, entries: Sequence[NameEntry], receiver: str) -> list[Problem]:
    members: dict[str, list[tuple[str, str]]] = {}
    for line in contract.lines:
        for place in line.places:
            members.setdefault(place.target, []).append((line.source, line.layers))
    sent = {entry.canonical for entry in entries if entry.targets}
    told: dict[tuple[str, str], Problem] = {}
    for entry in entries:
        found = contract.line_of(entry.canonical) if entry.targets else None
        for place in found[0].places if found else ():
            key = numbered(entry.canonical)
            missing = [
                fill(source, key)
                for source, layers in members[place.target]
                if meant_by(layers, key.layer) and fill(source, key) not in sent
            ]
            if missing and "{" not in "".join(missing):
                target = fill(place.target, key)
                others = ", ".join(missing[:_MOST_NAMED])
                what = f"{receiver} packs it into {target} together with {others}, which are not sent"
                fix = "Send the whole group in one sync."
                problem = Problem("incomplete-group", entry.canonical, what, fix)
                told.setdefault((target, missing[0]), problem)
    return list(told.values())
