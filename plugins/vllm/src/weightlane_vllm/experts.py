"""Names of routed experts: fused in the engine, one by one or fused in a checkpoint.

The engine keeps all experts of a layer in two stacks: `w13` (gate and up) and `w2` (down). Inside a LoRA
wrapper they lie one `base_layer` deeper.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ONE = re.compile(
    r"(?P<holder>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<projection>[^.]+)\.(?P<wrapped>base_layer\.)?(?P<leaf>[^.]+)"
)
_FUSED = re.compile(r"(?P<holder>(?:.*\.)?experts)\.(?P<wrapped>base_layer\.)?(?P<tail>[^.]+)")
_STACK = re.compile(
    r"(?P<holder>(?:.*\.)?experts)\.(?:base_layer\.)?(?:routed_experts\.)?(?P<tail>w(?:13|2)_[^.]+)"
)
_HALVES = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13", "w1")),
    **dict.fromkeys(("up_proj", "w3"), ("w13", "w3")),
    **dict.fromkeys(("down_proj", "w2"), ("w2", "w2")),
    "gate_up_proj": ("w13", ""),
}
_LEAF = re.compile(r"(?:.*_)?(?:weight|bias|scales?|inv|qweight|qzeros|idx|packed|blocks|zero_point)")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """One expert's tensor, or a fused alias of all (`number` ""), in the words of a checkpoint.

    `holder` is the module of all experts, `stack` the tail of the engine's tensor that takes it, `shard` the
    engine's word for the part ("" for all of it).
    """

    holder: str
    number: str
    stack: str
    shard: str


def one_expert(name: str) -> ExpertName | None:
    """The expert that `name` speaks of, with or without the wrapper's segment before its last part."""
    found = _ONE.fullmatch(name)
    if found is None or found["projection"] not in _HALVES:
        return None
    stack, shard = _HALVES[found["projection"]]
    return ExpertName(found["holder"], found["number"], f"{stack}_{found['leaf']}", shard)


def fused_alias(name: str) -> ExpertName | None:
    """All experts of a layer under one checkpoint name, such as `experts.gate_up_proj`, or None.

    A name that ends like a tensor's (`experts.w13_weight`) is none: the engine's loader knows it as it is.
    """
    found = _FUSED.fullmatch(name)
    if found is None or _LEAF.fullmatch(found["tail"]):
        return None
    stack, _ = _HALVES.get(found["tail"], ("", ""))
    return ExpertName(found["holder"], "", f"{stack}_weight" if stack else "", "")


def stack_alias(name: str) -> ExpertName | None:
    """A stack by the name that some mappers give it, without modules in between (`experts.w13_weight`)."""
    found = _STACK.fullmatch(name)
    return ExpertName(found["holder"], "", found["tail"], "") if found is not None else None


def expert_stacks(live: Iterable[str]) -> dict[str, dict[str, str]]:
    """Per module of experts, the engine's stacks: their tails (`w13_weight`) to their live names."""
    stacks: dict[str, dict[str, str]] = {}
    for name in live:
        found = _STACK.fullmatch(name)
        if found is not None:
            stacks.setdefault(found["holder"], {})[found["tail"]] = name
    return stacks
