"""Explains a name of either side by a contract alone: nothing is known of sizes, and all is assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.trace.contract_making import UNCONSUMED
from weightlane.trace.contract_text import place_text
from weightlane.trace.explanation import EVERY_WORKER, Explanation, Route
from weightlane.trace.patterns import EXPERT, fill, meant_by, numbered

if TYPE_CHECKING:
    from weightlane.trace.contract import Contract, Line, Place
    from weightlane.trace.explanation import Verdict
    from weightlane.trace.patterns import Numbered


def explain_by_contract(name: str, contract: Contract, receiver: str) -> Explanation | None:
    """The answer for a name that falls under one of its patterns; None for any other."""
    rule = f"snapshot of {contract.title}, {contract.style} names"
    key = numbered(name)
    for line in contract.lines:
        if key.pattern in {line.source, line.wire} and meant_by(line.layers, key.layer):
            return _source(fill(line.source, key), line, key, contract, rule)
    found = contract.line_of(name)
    if found is not None:
        return _source(name, *found, contract, f"{rule}, as in its layers {found[0].layers}")
    return _target(name, key, contract, receiver, rule)


def _source(name: str, line: Line, key: Numbered, contract: Contract, rule: str) -> Explanation:
    if not line.places:
        verdict: Verdict = "uncovered" if line.dropped == UNCONSUMED else "dropped"
        return Explanation(name, "checkpoint", verdict, (f"None of it lands: {line.dropped}.",), rule)
    for item in contract.refused:
        if line.source in item.names or name in item.names:
            by = f" by {item.operator}" if item.operator else ""
            said = f"Its loader does not place it plainly: {item.kind}{by}. A plan refuses it."
            return Explanation(name, "checkpoint", "refused", (said,), rule)
    wire = fill(line.wire, key)
    routes = tuple(_route(line, place, key) for place in line.places)
    targets = {place.target for place in line.places}
    packed = [source for each in contract.groups if each.target in targets for source in each.sources]
    group = tuple(filled for source in packed if (filled := fill(source, key)) != name)
    says = [f"It is assumed to land in {' and '.join(dict.fromkeys(route.target for route in routes))}."]
    says += [f"It is sent as {wire}."] if wire != name else []
    # One pattern stands for all experts, which lie in one tensor.
    experts = ["the same tensors of every other expert"] if any(EXPERT in item for item in packed) else []
    others = [*([", ".join(group)] if group else []), *experts]
    says += [f"It must travel in one sync with {' and '.join(others)}."] if others else []
    return Explanation(name, "checkpoint", "placed", tuple(says), rule, wire, routes, group=group)


def _target(name: str, key: Numbered, contract: Contract, receiver: str, rule: str) -> Explanation | None:
    says: list[str] = []
    for note in contract.aliases:
        if note.what == key.pattern and meant_by(note.layers, key.layer):
            says.append(f"It is another name of {fill(note.target, key)}.")
            key = numbered(fill(note.target, key))
            break
    made_of = [
        (line, place)
        for line in contract.lines
        for place in line.places
        if place.target == key.pattern and meant_by(line.layers, key.layer)
    ]
    if made_of:
        sources = tuple(dict.fromkeys(fill(line.source, key) for line, _ in made_of))
        says.append(f"It is a tensor of {receiver}, assumed to be made of {', '.join(sources)}.")
        if any("{expert}" in source for source in sources):
            says.append("There is one of these for each expert.")
        routes = tuple(_route(line, place, key) for line, place in made_of)
        group = sources if len(sources) > 1 else ()
        return Explanation(name, "receiver", "placed", tuple(says), rule, "", routes, group=group)
    for note in contract.owned:
        if note.target == key.pattern and meant_by(note.layers, key.layer):
            says.append(f"It is a tensor of {receiver}, and nobody has to send it: {note.what}.")
            return Explanation(name, "receiver", "owned", tuple(says), rule)
    return None


def _route(line: Line, place: Place, key: Numbered) -> Route:
    taken = place.taken or "all of it"
    source, target = fill(line.source, key), fill(place.target, key)
    return Route(EVERY_WORKER, source, taken, target, fill(place_text(place), key), place.via)
