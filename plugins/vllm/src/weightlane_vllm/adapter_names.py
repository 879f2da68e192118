"""An adapter's tensors towards vLLM: under peft's own names, which it reads, in the dtype of its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapter_entries import entries_of_adapter

if TYPE_CHECKING:
    from weightlane.contexts import MapNamesContext
    from weightlane.receiver import NameEntry


def map_adapter(context: MapNamesContext) -> tuple[NameEntry, ...]:
    """One entry per tensor, in manifest order.

    Whether there is a layer for it, each worker says for itself before it takes the plan.
    """
    held = context.facts.launch_arguments.get("lora_dtype", "")
    return entries_of_adapter(context, dtype=held)
