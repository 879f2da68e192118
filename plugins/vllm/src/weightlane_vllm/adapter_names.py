"""An adapter's tensors towards vLLM: under peft's own names, which it reads, in the dtype of its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.manifest import FLOATING
from weightlane.peft import parse_lora_name
from weightlane.receiver import UNKNOWN, NameEntry

if TYPE_CHECKING:
    from weightlane.contexts import MapNamesContext


def map_adapter(context: MapNamesContext) -> tuple[NameEntry, ...]:
    """One entry per tensor, in manifest order; what it reaches is told by the weight that it is added to.

    Whether there is a layer for it, each worker says for itself before it takes the plan.
    """
    expected = {tensor.name for tensor in context.worker.expected}
    held = context.facts.launch_arguments.get("lora_dtype", "")
    entries: list[NameEntry] = []
    for spec in context.manifest.tensors:
        parsed = parse_lora_name(spec.name)
        weight = f"{parsed.module}.weight" if parsed else ""
        targets = (weight,) if weight in expected else ()
        dtype = held if {held, spec.dtype} <= FLOATING else spec.dtype
        entries.append(NameEntry(spec.name, spec.name, dtype, targets, "lora" if targets else UNKNOWN))
    return tuple(entries)
