"""Why a name goes where it goes: from a checkpoint name, a receiver tensor, a LoRA matrix or a misspelt one.

Pure: the tables of a traced engine, or a contract where there are none, and what a manifest holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from weightlane.errors import near_names
from weightlane.trace.beyond import beyond
from weightlane.trace.boxes import SAME_ORDER, Box, Landing, landings
from weightlane.trace.coverage import target_coverage
from weightlane.trace.explain_contract import explain_by_contract
from weightlane.trace.explain_lora import explain_lora
from weightlane.trace.explanation import Explanation, Route, Verdict
from weightlane.trace.groups import PackedGroup, packed_groups
from weightlane.trace.patterns import fill, numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.manifest import TensorSpec
    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable, TracedTarget

_BUFFERS = "A trainer may hold it as a buffer, which named_parameters() does not list: see named_buffers()."
_HIDDEN = "LoRA is on, and a loader may lose what it wraps: an engine without LoRA may take it."
_OF_PARAMETERS = ("weight", "bias")
_MOST_ROUTES = 24  # an expert tensor of 128 experts has as many as that and more


@dataclass(frozen=True, slots=True)
class Known:
    """All that an answer can rest on; without tables the contract answers, without both only the manifest."""

    receiver: str
    tensors: Sequence[TensorSpec]
    dropped: Mapping[str, str]
    tables: Sequence[PlacementTable] = ()
    contract: Contract | None = None
    lora: bool = False
    _landings: dict[int, tuple[Landing, ...]] = field(default_factory=dict)

    def landed(self, worker: int) -> tuple[Landing, ...]:
        """Those of one worker's table, found once."""
        if worker not in self._landings:
            self._landings[worker] = landings(self.tables[worker])
        return self._landings[worker]


def explain(name: str, known: Known) -> Explanation:
    """The answer for a name of either side."""
    traced = known.tables[0].sources if known.tables else ()
    sources = {source.wire: source.canonical for source in traced}
    sources |= {source.canonical: source.canonical for source in traced}
    if name in known.dropped:
        return Explanation(
            name, "checkpoint", "dropped", (f"It is not sent: {known.dropped[name]}.",), "dropped"
        )
    if name in sources:
        return _of_source(sources[name], known)
    targets = {held: item for table in known.tables for item in table.targets for held in _names(item)}
    if name in targets:
        return _of_target(name, targets[name], known)
    held = {spec.name: None for spec in known.tensors}
    missing = beyond(name, [*held, *sources, *targets])
    if missing:
        near = near_names(name, [*held, *sources, *targets])
        answer = (missing, "A name that is in neither would land nowhere: correct its number.")
        return Explanation(name, "unknown", "unknown", answer, near=near)
    if not known.tables and known.contract is not None:
        found = explain_by_contract(name, known.contract, known.receiver)
        if found is not None:
            return found
    lora = explain_lora(name, known.tables, known.contract, lora=known.lora, receiver=known.receiver)
    if lora is not None:
        return Explanation(name, "lora", lora.verdict, lora.says, lora.rule, near=lora.near)
    if name in held:
        says = f"The checkpoint has it; where {known.receiver} puts it is not known, since it is untraced."
        return Explanation(name, "checkpoint", "unknown", (says,))
    return _unknown(name, [*held, *sources, *targets], known)


def _names(target: TracedTarget) -> tuple[str, ...]:
    return (target.name, *target.aliases)


def _of_source(name: str, known: Known) -> Explanation:
    table = known.tables[0]
    source = next(item for item in table.sources if item.canonical == name)
    routes = _routes(known, source=name)
    style = f"traced, {table.style} names"
    obstacles = [item for table in known.tables for item in table.obstacles if name in item.sources]
    groups = [group for group in packed_groups(known.tables) if name in group.sources]
    verdict: Verdict = "placed" if routes else "uncovered"
    says: list[str] = []
    if obstacles:
        verdict = "refused"
        what = f"{obstacles[0].kind} by {obstacles[0].operator or obstacles[0].detail}"
        says.append(f"The loader of {known.receiver} does not place it plainly: {what}.")
        says.append("Where its elements land cannot be proven, so a plan with it is refused.")
        says.append("Report the architecture.")
    elif not routes:
        near = near_names(name, [item.name for item in table.targets])
        says.append(f"The loader of {known.receiver} accepts it and writes it nowhere: it would be lost.")
        says.append("Leave it out of the export, or send it under a name that the loader knows.")
        if known.lora:
            says.append(_HIDDEN)
        return Explanation(name, "checkpoint", verdict, tuple(says), style, source.wire, near=near)
    else:
        says += _placed(name, source.wire, routes)
        says += _together(name, groups)
        buffers = {item.name for item in table.targets if item.kind == "buffer"}
        # An engine may hold as a parameter what a trainer holds as a buffer, as SGLang does a router's bias.
        if buffers & {route.target for route in routes} or name.rpartition(".")[2] not in _OF_PARAMETERS:
            says.append(_BUFFERS)
    group = tuple(dict.fromkeys(item for found in groups for item in found.sources if item != name))
    return Explanation(
        name, "checkpoint", verdict, tuple(says), style, source.wire, *_cut(routes), group=group
    )


def _placed(name: str, wire: str, routes: Sequence[Route]) -> list[str]:
    targets = dict.fromkeys(route.target for route in routes)
    workers = len({route.worker for route in routes})
    over = f" on {workers} workers" if workers > 1 else ""
    sent = f" It is sent as {wire}." if wire != name else ""
    casts = dict.fromkeys(route.casts for route in routes if route.casts)
    cast = "".join(f" It is cast to {' then '.join(chain)}." for chain in casts)
    return [f"It lands in {' and '.join(targets)}{over}.{sent}{cast}"]


def _together(name: str, groups: Sequence[PackedGroup]) -> list[str]:
    says: list[str] = []
    for group in groups:
        # The nearest first: of 128 experts, its own other half.
        others = [item for item in group.sources if item != name]
        others.sort(key=lambda item: -_parts_shared(item, name))
        shown = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
        says.append(f"{group.target} is packed: it must travel in one sync with {shown}.")
    return says


def _parts_shared(one: str, other: str) -> int:
    """How many parts of two dotted names are the same before the first that differs."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _of_target(name: str, target: TracedTarget, known: Known) -> Explanation:
    routes = _routes(known, target=target.name)
    style = f"traced, {known.tables[0].style} names"
    sources = tuple(dict.fromkeys(route.source for route in routes))
    says: list[str] = []
    if name != target.name:
        says.append(f"It is another name of {target.name}.")
    kind = {"parameter": "a parameter", "buffer": "a buffer", "attribute": "a parameter in an attribute"}
    what = f"It is {kind[target.kind]} of {known.receiver}, {target.dtype} {list(target.shape)}"
    states = [
        item for table in known.tables for item in target_coverage(table) if item.target.name == target.name
    ]
    never, more = max(item.never for item in states), max(item.more for item in states)
    verdict: Verdict = "placed"
    if target.owned and not routes:
        verdict = "owned"
        says.append(f"{what}, and nobody has to send it: {target.owned}.")
    elif not routes:
        verdict = "uncovered"
        says.append(f"{what}, and nothing that is exported is written to it: it would keep what it holds.")
        near = near_names(name, [spec.name for spec in known.tensors])
        says.append("Export the checkpoint tensor that it is loaded from.")
        says.append(_BUFFERS)
        return Explanation(name, "receiver", verdict, tuple(says), style, near=near)
    else:
        says.append(f"{what}, made of {len(sources)} checkpoint tensor{'s' if len(sources) > 1 else ''}.")
        if never or more:
            verdict = "in-part"
            count = f"{never} of its {target.elements} elements are written by nothing"
            says.append(f"{count if never else f'{more} elements are written more than once'}: see the plan.")
        filled = max(item.filled for item in states)
        if filled:
            says.append(f"{filled} of its {target.elements} elements are padding that the loader fills.")
        if len(sources) > 1:
            says.append("They must travel in one sync, all of them.")
    return Explanation(name, "receiver", verdict, tuple(says), style, "", *_cut(routes), group=sources)


def _routes(known: Known, *, source: str = "", target: str = "") -> list[Route]:
    found: list[Route] = []
    for number, table in enumerate(known.tables):
        for item in known.landed(number):
            one, other = table.sources[item.source], table.targets[item.target]
            if source in {"", one.canonical} and target in {"", other.name}:
                found.append(
                    Route(
                        table.key.worker,
                        one.canonical,
                        _range(item.taken, one.shape),
                        other.name,
                        _range(item.put, other.shape),
                        item.casts,
                        item.order if item.order != SAME_ORDER else "",
                    )
                )
    return found


def _range(box: Box | None, shape: Sequence[int]) -> str:
    """As Python would slice it."""
    if box is None:
        return f"elements of its own of {list(shape)}"
    if box.covers(shape):
        return f"all of {list(shape)}"
    slices = [
        ":" if size == whole else str(first) if size == 1 else f"{first}:{last + 1}"
        for first, last, size, whole in zip(box.first, box.last, box.sizes, shape, strict=True)
    ]
    return f"[{', '.join(slices)}] of {list(shape)}"


def _cut(routes: Sequence[Route]) -> tuple[tuple[Route, ...], int]:
    return tuple(routes[:_MOST_ROUTES]), max(0, len(routes) - _MOST_ROUTES)


def _unknown(name: str, names: Sequence[str], known: Known) -> Explanation:
    patterns: list[str] = []
    if known.contract is not None and not known.tables:
        patterns = [line.source for line in known.contract.lines]
        patterns += [place.target for line in known.contract.lines for place in line.places]
    key = numbered(name)
    filled = [fill(pattern, key) for pattern in patterns]
    near = near_names(name, dict.fromkeys([*names, *filled]))
    says = [f"Neither the checkpoint nor {known.receiver} has a tensor of this name."]
    says.append(f"Did you mean {near[0]}?" if near else "`weightlane plan` lists the names of both sides.")
    return Explanation(name, "unknown", "unknown", tuple(says), near=near)
