"""The spelling that SGLang's loader takes: plain checkpoint names, with LoRA on as well as off.

Its LoRA wrappers show the weight that they wrap under the plain name, so a trainer's wrappers must leave no
trace in a name: neither peft's root nor its `base_layer`. A name that keeps them is ignored silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

PEFT_ROOT = "base_model.model."
_WRAPPER = "base_layer"


def plain_name(name: str) -> str:
    """`name` without peft's root, and without every part that is `base_layer` between two others.

    Whole parts alone: `base_layernorm` stays, and so does a part at either end, which wraps nothing.
    """
    first, *inner = name.removeprefix(PEFT_ROOT).split(".")
    if not inner:
        return first
    return ".".join([first, *(part for part in inner[:-1] if part != _WRAPPER), inner[-1]])


def landing(name: str, live: Collection[str], packed: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The live tensor that a plain name reaches and the part of it (`q`, `gate`); empty where none is known.

    `packed` maps a fused module to its pieces; whole parts of the name are compared, and of several owners
    the first that is live takes it.
    """
    if name in live:
        return name, ""
    module, _, leaf = name.rpartition(".")
    holder, dot, piece = module.rpartition(".")
    for owner, pieces in packed.items():
        target = f"{holder}{dot}{owner}.{leaf}"
        if piece in pieces and target in live:
            return target, piece.removesuffix("_proj")
    return "", ""
