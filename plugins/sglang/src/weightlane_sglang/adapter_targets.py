"""Which modules SGLang puts LoRA on, in its own words: one table for its launch and for every load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.peft.engine_targets import SGLANG_EVERYTHING, TargetWords

if TYPE_CHECKING:
    from collections.abc import Iterable

WORDS = TargetWords("SGLang", everything=SGLANG_EVERYTHING)

PACKED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused modules, with their parts in the order of their rows.

A part goes with all of its group or not at all: of key and value without query the whole server dies at the
first generation; query without value is refused."""

GROUPS = tuple(PACKED.values())

NOT_SHOWN = ("embed_tokens", "lm_head")
"""Modules that SGLang can put LoRA on and this plugin has not been shown to prove bound."""


def fused_module(module: str) -> tuple[str, int]:
    """The engine's module that holds a checkpoint module, and which part of it; itself and 0 if alone."""
    parent, dot, leaf = module.rpartition(".")
    for fused, parts in PACKED.items():
        if leaf in parts:
            return f"{parent}{dot}{fused}", parts.index(leaf)
    return module, 0


def served_leaves(launched_for: Iterable[str]) -> frozenset[str]:
    """Leaf names that a server takes LoRA on, given those that it was launched for.

    SGLang puts LoRA on a fused module as soon as one part of it is named.
    """
    named = {name.rpartition(".")[2] for name in launched_for}
    for fused, parts in PACKED.items():
        if named & {fused, *parts}:
            named |= {fused, *parts}
    return frozenset(named)
