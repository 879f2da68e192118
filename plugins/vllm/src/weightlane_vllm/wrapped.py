"""How a name is spelt towards a model with LoRA wrappers: with `.base_layer` or without, decided per name.

A model is wrapped in part (a vision tower is not), engines disagree about which form their loaders take, and
experts are read by a loader of their own. The answer is always the sender's spelling, with one segment at
most: the loader applies its own mapper, and a name that was mapped before would be mapped twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane_vllm.experts import fused_alias
from weightlane_vllm.namespace import BASE, SEGMENT, with_segment, without_segment

if TYPE_CHECKING:
    from weightlane_vllm.namespace import Namespace


def needs_spelling(name: str, space: Namespace) -> bool:
    """False where the name is right as it is: no wrapper in the receiver, and none in the name."""
    return bool(space.wrapped) or SEGMENT in name


def spell(name: str, space: Namespace) -> str:
    """The name to send for `name`. Idempotent for names that hold the segment once at most."""
    if space.fused_experts(name):
        return _spell_expert(name, space)
    if fused_alias(name) is not None and space.wrapped_experts(name):
        return _spell_alias(name, space)
    if SEGMENT in name:
        if not space.wrapper_loads and space.is_wrapped(name):
            return name
        plain = without_segment(name)
        # Without the segment where it was, it may be wanted elsewhere. One too many is the sender's mistake.
        return plain if SEGMENT in plain else spell(plain, space)
    if space.wrapper_loads or space.reach(name) is not None:
        return name
    inside = with_segment(name)
    return inside if space.reach(inside) is not None else name


def _spell_expert(name: str, space: Namespace) -> str:
    """Whether wrappers load plain names says nothing of experts: their loader has its own prefix, or none.

    With a prefix it accepts the plain name and writes it nowhere.
    """
    plain = without_segment(name)
    if space.expert_prefix and space.wrapped_experts(name):
        module, _, leaf = plain.rpartition(".")
        return f"{module}.{space.expert_prefix}{leaf}"
    return plain


def _spell_alias(name: str, space: Namespace) -> str:
    """All experts in one tensor lie under the wrapper's own name for them, with either kind of wrapper."""
    plain = without_segment(name)
    if space.reach(plain) is not None:
        return plain
    holder, _, tail = plain.rpartition(".")
    return f"{holder}.{BASE}.{tail}"
