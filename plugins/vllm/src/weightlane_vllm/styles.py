"""The styles of names that vLLM's loaders take once LoRA wrappers are around modules. No engine, no torch.

A wrapper holds the module it wraps as `base_layer`, so its parameters are called `q.base_layer.weight`. Which
names its loader takes changed: 0.27.1 takes `.base_layer` names for every wrapped module, 0.32 takes plain
ones for all but routed experts, whose plain names it drops without a word. A trace tries each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NameStyle: TypeAlias = Literal["plain", "base-layer", "mixed"]
"""plain: canonical names. base-layer: `.base_layer` before the leaf of each wrapped module. mixed: plain, but
experts in the form that their wrapper asks for."""

WRAPPED = "base_layer"
"""The attribute under which a LoRA wrapper holds what it wraps."""


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The LoRA wrappers of a live model.

    `modules` are their paths in the model. `experts` maps the path of wrapped routed experts to the prefix
    that their loader looks for before a leaf (vLLM's `lora_base_layer_prefix`, such as `base_layer.`).
    `packed` are the modules that a fused one is made of, as the model class declares them.
    """

    modules: frozenset[str] = frozenset()
    experts: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def styles(self) -> tuple[NameStyle, ...]:
        """Those that differ, the commonest first."""
        if not self.modules:
            return ("plain",)
        return ("plain", "mixed", "base-layer") if self.experts else ("plain", "base-layer")


def styled_name(style: NameStyle, name: str, wrappers: Wrappers, place_of: Callable[[str], str]) -> str:
    """The name under which a loader of `style` is handed the checkpoint tensor `name`.

    `place_of` gives the receiver's own name for a canonical one, without wrappers: prefixes renamed, packed
    or not.
    """
    if style == "plain":
        return name
    stem, dot, leaf = name.rpartition(".")
    place = place_of(name)
    for path, prefix in wrappers.experts.items():
        if place.startswith(f"{path}."):
            return f"{stem}{dot}{prefix}{leaf}"
    if style == "mixed":
        return name
    module = place.rpartition(".")[0]
    holder, _, piece = module.rpartition(".")
    fused = [whole for whole, pieces in wrappers.packed.items() if piece in pieces]
    candidates = (module, *(f"{holder}.{whole}" if holder else whole for whole in fused))
    if any(candidate in wrappers.modules for candidate in candidates):
        return f"{stem}{dot}{WRAPPED}.{leaf}"
    return name
