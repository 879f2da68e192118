"""Names of adapter tensors.

They are those of peft's own checkpoint file (`adapter_model.safetensors`): the wrapper's prefix, the module's
checkpoint name, `lora_A` or `lora_B`, and `weight`; the adapter's name is no part of them. So an export, a
folder that peft saved and a folder that is pushed all agree, and an engine that reads such folders takes the
names as they are.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

WRAPPER_PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""

_LORA_NAME = re.compile(rf"{re.escape(WRAPPER_PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class LoraName(NamedTuple):
    """A parsed tensor name. Side A is (rank, in), side B (out, rank)."""

    module: str
    side: Literal["A", "B"]


def parse_lora_name(name: str) -> LoraName | None:
    """Module and side of a canonical adapter tensor; None for any other name."""
    found = _LORA_NAME.fullmatch(name)
    return LoraName(found["module"], "A" if found["side"] == "A" else "B") if found else None


def lora_name(module: str, side: Literal["A", "B"]) -> str:
    """The canonical name of one matrix of a module."""
    return f"{WRAPPER_PREFIX}{module}.lora_{side}.weight"
