"""An adapter's tensors under peft's own names, for engines whose loaders read those."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.manifest import FLOATING
from weightlane.peft import parse_lora_name
from weightlane.receiver import UNKNOWN, NameEntry

if TYPE_CHECKING:
    from weightlane.contexts import MapNamesContext


def entries_of_adapter(context: MapNamesContext, *, dtype: str = "") -> tuple[NameEntry, ...]:
    """One entry per tensor, in manifest order; what it reaches is told by the weight that it is added to.

    Args:
        context: of phase ADAPTER.
        dtype: what the engine holds matrices in; "" for that of the weight that they are added to.
    """
    expected = {tensor.name: tensor.dtype for tensor in context.worker.expected}
    entries: list[NameEntry] = []
    for spec in context.manifest.tensors:
        parsed = parse_lora_name(spec.name)
        weight = f"{parsed.module}.weight" if parsed else ""
        targets = (weight,) if weight in expected else ()
        held = dtype or expected.get(weight, "")
        wire = held if {held, spec.dtype} <= FLOATING else spec.dtype
        entries.append(NameEntry(spec.name, spec.name, wire, targets, "lora" if targets else UNKNOWN))
    return tuple(entries)
