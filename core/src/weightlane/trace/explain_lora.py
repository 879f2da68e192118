"""What becomes of one LoRA matrix: which receiver tensor its module is, and whether that is wrapped."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from weightlane.errors import near_names
from weightlane.trace.patterns import fill, numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable

_MATRIX = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.[\w-]+)?)"
)
_WRAPPED = ".base_layer."
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LoraAnswer:
    """As the fields of `Explanation`."""

    verdict: Literal["placed", "refused", "unknown"]
    says: tuple[str, ...]
    rule: str
    near: tuple[str, ...] = ()


@dataclass(slots=True)
class _Modules:
    """Checkpoint modules and the receiver tensor of each one's weight; which of these tensors are wrapped.

    `lost` are modules whose weight the receiver's loader writes nowhere.
    """

    targets: dict[str, str] = field(default_factory=dict)
    wrapped: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, weight: str, target: str, aliases: Sequence[str]) -> None:
        self.targets.setdefault(weight.removesuffix(_WEIGHT), target)
        if any(_WRAPPED in name for name in (target, *aliases)):
            self.wrapped.add(target)

    @property
    def wrapped_kinds(self) -> list[str]:
        """Last parts of the names of wrapped modules."""
        return sorted({name.rpartition(".")[2] for name, at in self.targets.items() if at in self.wrapped})


def explain_lora(
    name: str,
    tables: Sequence[PlacementTable],
    contract: Contract | None,
    *,
    lora: bool,
    receiver: str,
) -> LoraAnswer | None:
    """The answer for the name of a LoRA matrix; None for any other name."""
    found = _MATRIX.fullmatch(name)
    if found is None:
        return None
    module = found["module"]
    what = f"It is matrix {found['side'] or found['embedding']} of a LoRA adapter on module {module}"
    modules = _traced(tables) if tables else _assumed(contract, module)
    if module not in modules.targets:
        return _not_placed(name, module, what, modules, receiver)
    target = modules.targets[module]
    if not lora:
        says = (
            f"{what}, which lies in {target}.",
            f"{receiver} runs without LoRA, so nothing would bind it.",
            "Start the engine with LoRA on, or merge the adapter into its base.",
        )
        return LoraAnswer("refused", says, "LoRA is off")
    if target in modules.wrapped:
        return LoraAnswer("placed", (f"{what}. {receiver} wraps it: {target} is its base.",), "wrapped")
    kinds = ", ".join(modules.wrapped_kinds) or "no module at all"
    says = (
        f"{what}. {receiver} holds that module in {target} and does not wrap it: it would bind to nothing.",
        f"It wraps {kinds}.",
        f"Take {module.rpartition('.')[2]} out of the adapter's target_modules, or merge the adapter.",
    )
    return LoraAnswer("refused", says, "not wrapped")


def _not_placed(name: str, module: str, what: str, modules: _Modules, receiver: str) -> LoraAnswer:
    if module in modules.lost:
        why = f"{what}. The loader of {receiver} writes its own weight nowhere: what would bind is unknown."
        fix = "Take it out of the adapter's target_modules, or merge and start the engine without LoRA."
        return LoraAnswer("refused", (why, fix), "its module is not loaded")
    parts = tuple(source for source, at in modules.targets.items() if at.removesuffix(_WEIGHT) == module)
    near = parts or near_names(module, modules.targets)
    if parts:
        why = f"{what}, which {receiver} makes of {', '.join(parts)}."
        fix = "Name these instead: an adapter's matrices are of modules of the checkpoint."
    else:
        why = f"{what}, and {receiver} has no such module."
        fix = f"Did you mean module {near[0]}?" if near else "Check the adapter's target_modules."
    return LoraAnswer("unknown", (why, fix), "", tuple(name.replace(module, other, 1) for other in near))


def _traced(tables: Sequence[PlacementTable]) -> _Modules:
    modules = _Modules()
    for table in tables:
        aliases = {target.name: target.aliases for target in table.targets}
        for name, targets in table.targets_of().items():
            if name.endswith(_WEIGHT) and targets:
                modules.add(name, targets[0], aliases[targets[0]])
            elif name.endswith(_WEIGHT):
                modules.lost.add(name.removesuffix(_WEIGHT))
    modules.lost.difference_update(modules.targets)  # one worker of several may hold it
    return modules


def _assumed(contract: Contract | None, module: str) -> _Modules:
    """From a contract's lines, for the layer and expert of the module that is asked about."""
    modules, key = _Modules(), numbered(module)
    aliases = {note.target: note.what for note in contract.aliases} if contract else {}
    for line in contract.lines if contract else ():
        if line.places and line.source.endswith(_WEIGHT):
            target = line.places[0].target
            modules.add(fill(line.source, key), fill(target, key), (aliases.get(target, ""),))
    return modules
