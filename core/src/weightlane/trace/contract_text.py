"""A contract as text: one line for each pattern, so that what a new release changes is a diff in review."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weightlane.errors import ContractError
from weightlane.trace.contract import Contract, Line, Note, Place, Refused
from weightlane.trace.patterns import ALL_LAYERS, meant_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_HEAD = "weightlane contract, format 1"
_END = "[end]"
_FIELDS = ("engine", "architecture", "tensor parallel", "lora", "names")
_WIDTH = max(map(len, _FIELDS)) + 2
_NAME = r"[^\s:]+"
_LAYERS = r"(?: \(layers? (?P<layers>[^)]*)\))?"
_LINE = re.compile(rf"(?P<source>{_NAME})(?: sent as (?P<wire>{_NAME}))?{_LAYERS} -> (?P<rest>.+)")
_NOTE = re.compile(rf"(?P<target>{_NAME}){_LAYERS}: (?P<what>.+)")
_REFUSED = re.compile(r"(?P<kind>[a-z-]+) by (?P<operator>\S+): (?P<names>.*)")
_NOTHING = "nothing: "
_PART = r"(?:(?:rows|columns|axis \d+) \d+ of \d+|a part)"
_SLICE = r"(?:slice \{expert\}|a slice of the worker's own)"
_WHERE = re.compile(rf"whole|elements of its own|{_SLICE}(?: {_PART})?|{_PART}")


def contract_text(contract: Contract) -> str:
    """The canonical text; `parse_contract` is its inverse."""
    values = (
        f"{contract.engine} {contract.engine_version}",
        contract.architecture,
        str(contract.tensor_parallel),
        "on" if contract.lora else "off",
        contract.style,
    )
    head = [_HEAD, *(f"{name:<{_WIDTH}}{value}" for name, value in zip(_FIELDS, values, strict=True))]
    sections = {
        "placed": [line_text(line) for line in contract.lines],
        "groups": [f"{group.target} <- {', '.join(group.sources)}" for group in contract.groups],
        "owned by the engine": [_note_text(note) for note in contract.owned],
        "aliases": [_note_text(note) for note in contract.aliases],
        "not covered": [_note_text(note) for note in contract.uncovered],
        "refused": [
            f"{item.kind} by {item.operator or '-'}: {', '.join(item.names)}" for item in contract.refused
        ],
    }
    # Counted, so that a line that gets lost is seen.
    body = [line for name, rows in sections.items() if rows for line in ("", f"[{name}: {len(rows)}]", *rows)]
    return "\n".join([*head, *body, "", _END, ""])


def line_text(line: Line) -> str:
    """One line of the section `placed`."""
    sent = f" sent as {line.wire}" if line.wire != line.source else ""
    places = " + ".join(f"{place.target}: {place_text(place)}" for place in line.places)
    return f"{line.source}{sent}{_layers_text(line.layers)} -> {places or _NOTHING + line.dropped}"


def place_text(place: Place) -> str:
    """Where in its target elements land, in words."""
    words = [place.where]
    words += [f"from {place.taken}"] if place.taken else []
    words += [f"split by {place.split}"] if place.split else []
    words += [place.order] if place.order else []
    words += [f"as {place.dtype}"] if place.dtype else []
    words += [f"by way of {' '.join(place.via)}"] if place.via else []
    words += ["padded"] if place.padded else []
    return ", ".join(words)


def parse_contract(text: str, *, origin: str) -> Contract:
    """The contract of a text.

    Args:
        text: what `contract_text` gave.
        origin: the file that it comes from, for messages.

    Raises:
        ContractError: it is damaged, or not what `contract_text` would write; names the line.
    """
    lines = text.split("\n")
    head = _parse_head(lines, origin)
    rows: dict[str, list[tuple[int, str]]] = {}
    section = ""
    for number, line in enumerate(lines[len(_FIELDS) + 1 :], len(_FIELDS) + 2):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].partition(":")[0]
            rows.setdefault(section, [])
        elif line:
            rows.setdefault(section, []).append((number, line))

    def read(name: str, parse: Callable[[str], object]) -> Iterator[object]:
        for number, line in rows.get(name, ()):
            try:
                yield parse(line)
            except ValueError as error:
                raise _damaged(origin, number, str(error)) from error

    parsed = Contract(
        *head,
        lines=tuple(read("placed", _parse_line)),  # type: ignore[arg-type]
        owned=tuple(read("owned by the engine", _parse_note)),  # type: ignore[arg-type]
        aliases=tuple(read("aliases", _parse_note)),  # type: ignore[arg-type]
        uncovered=tuple(read("not covered", _parse_note)),  # type: ignore[arg-type]
        refused=tuple(read("refused", _parse_refused)),  # type: ignore[arg-type]
    )
    _require_canonical(parsed, lines, origin)
    return parsed


def _parse_head(lines: Sequence[str], origin: str) -> tuple[str, str, str, int, bool, str]:
    if lines[0] != _HEAD:
        raise _damaged(origin, 1, f"it reads {lines[0][:60]!r}, not {_HEAD!r}")
    values: list[str] = []
    for number, field in enumerate(_FIELDS, 1):
        line = lines[number] if number < len(lines) else ""
        if line[:_WIDTH].rstrip() != field or not line[_WIDTH:]:
            raise _damaged(origin, number + 1, f"it should tell the {field}")
        values.append(line[_WIDTH:])
    engine, _, version = values[0].partition(" ")
    if not values[2].isdecimal() or values[3] not in {"on", "off"} or not version:
        raise _damaged(origin, 2, "the head has a value that cannot be")
    return engine, version, values[1], int(values[2]), values[3] == "on", values[4]


def _parse_line(text: str) -> Line:
    found = _matched(_LINE, text)
    source, rest = found["source"], found["rest"]
    dropped = rest.removeprefix(_NOTHING) if rest.startswith(_NOTHING) else ""
    places = () if dropped else tuple(_parse_place(part) for part in rest.split(" + "))
    return Line(source, found["wire"] or source, _parse_layers(found["layers"]), places, dropped)


def _parse_place(text: str) -> Place:
    target, _, words = text.partition(": ")
    where, *more = words.split(", ")
    fields: dict[str, str] = {}
    via: tuple[str, ...] = ()
    for word in more:
        if word.startswith("by way of "):
            via = tuple(word.removeprefix("by way of ").split(" "))
        elif word in {"transposed", "rearranged"}:
            fields["order"] = word
        elif word.startswith("from "):
            fields["taken"] = word.removeprefix("from ")
        elif word.startswith("split by "):
            fields["split"] = word.removeprefix("split by ")
        elif word.startswith("as "):
            fields["dtype"] = word.removeprefix("as ")
        elif word != "padded":
            raise ValueError(f"{word!r} tells nothing of a place")
    if not target or not _WHERE.fullmatch(where):
        raise ValueError(f"{where!r} is no place in a target")
    return Place(target, where, via=via, padded="padded" in more, **fields)


def _parse_note(text: str) -> Note:
    found = _matched(_NOTE, text)
    return Note(found["target"], found["what"], _parse_layers(found["layers"]))


def _parse_refused(text: str) -> Refused:
    found = _matched(_REFUSED, text)
    operator = "" if found["operator"] == "-" else found["operator"]
    return Refused(found["kind"], operator, tuple(filter(None, found["names"].split(", "))))


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError("it is no line of its section")
    return found


def _layers_text(words: str) -> str:
    if words == ALL_LAYERS:
        return ""
    return f" (layer{'' if words.isdecimal() else 's'} {words})"


def _parse_layers(words: str | None) -> str:
    if words is None:
        return ALL_LAYERS
    meant_by(words, 0)  # raises ValueError where these are no words for layers
    return words


def _note_text(note: Note) -> str:
    return f"{note.target}{_layers_text(note.layers)}: {note.what}"


def _require_canonical(parsed: Contract, lines: Sequence[str], origin: str) -> None:
    """Written again it must be the same: a line that was lost or added by hand is seen so."""
    for number, line in enumerate(contract_text(parsed).split("\n")):
        if number >= len(lines) or lines[number] != line:
            found = lines[number][:60] if number < len(lines) else "nothing"
            raise _damaged(origin, number + 1, f"it reads {found!r} where {line[:60]!r} is meant")
    if len(lines) != number + 1:
        raise _damaged(origin, len(lines), "there is more after the end")


def _damaged(origin: str, number: int, why: str) -> ContractError:
    return ContractError(
        f"The contract {origin} is damaged in line {number}: {why}.",
        "A plan made from it would be wrong.",
        "Restore the file; `nox -s contracts -- --write` makes the repository's anew.",
    )
