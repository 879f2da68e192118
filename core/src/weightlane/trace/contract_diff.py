"""What differs between two contracts, line by line and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from weightlane.trace.contract_text import line_text, place_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.trace.contract import Contract, Line, Note

Change: TypeAlias = Literal["added", "removed", "changed"]


class Difference(msgspec.Struct, frozen=True):
    """One thing that the newer contract has otherwise; `before` and `after` are lines of text, "" if none."""

    change: Change
    subject: str
    before: str
    after: str
    words: str


def contract_differences(before: Contract, after: Contract) -> tuple[Difference, ...]:
    """What `after` adds, lacks and has otherwise, in the order of its lines; versions are not compared."""
    old, new = _parts(before), _parts(after)
    order = [*new, *(key for key in old if key not in new)]
    found: list[Difference] = []
    for key in order:
        was, now = old.get(key, ()), new.get(key, ())
        if was == now:
            continue
        change: Change = "changed" if was and now else "added" if now else "removed"
        texts = "; ".join(text for text, _ in was), "; ".join(text for text, _ in now)
        words = _words(change, key[0], was, now)
        found.append(Difference(change, key[1], *texts, words))
    return tuple(found)


_Row: TypeAlias = tuple[str, dict[str, str]]


def _parts(contract: Contract) -> dict[tuple[str, str], tuple[_Row, ...]]:
    """Every line by (section, subject), with what it says field by field."""
    parts: dict[tuple[str, str], list[_Row]] = {}
    for line in contract.lines:
        parts.setdefault(("checkpoint name", line.source), []).append((line_text(line), _fields(line)))
    notes: tuple[tuple[str, Iterable[Note]], ...] = (
        ("tensor owned by the engine", contract.owned),
        ("second name", contract.aliases),
        ("tensor that is not covered", contract.uncovered),
    )
    for section, rows in notes:
        for note in rows:
            told = {"reason": note.what, "layers": note.layers}
            parts.setdefault((section, note.target), []).append((f"{note.target}: {note.what}", told))
    for item in contract.refused:
        subject = ", ".join(item.names) or item.operator
        text = f"{item.kind} by {item.operator}: {subject}"
        parts.setdefault(("obstacle", subject), []).append(
            (text, {"obstacle": f"{item.kind} {item.operator}"})
        )
    parts["names", "style"] = [(contract.style, {"style": contract.style})]
    return {key: tuple(rows) for key, rows in parts.items()}


def _fields(line: Line) -> dict[str, str]:
    return {
        "layers": line.layers,
        "name to send": line.wire,
        "receiver tensor": " and ".join(place.target for place in line.places) or "nothing",
        "place in it": " and ".join(place_text(place) for place in line.places) or line.dropped,
    }


def _words(change: Change, section: str, was: tuple[_Row, ...], now: tuple[_Row, ...]) -> str:
    if change != "changed":
        return f"{section} {change}"
    if len(was) != len(now):
        return f"{section}: told in {len(was)} lines, now in {len(now)}"
    told: dict[str, None] = {}
    for (_, before), (_, after) in zip(was, now, strict=True):
        for field, value in after.items():
            if before.get(field) != value:
                told[f"{field} was {before.get(field)}, is {value}"] = None
    return "; ".join(told)
