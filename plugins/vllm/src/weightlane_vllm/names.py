"""The static name map: from a checkpoint name to the receiver tensors it reaches.

No engine and no torch here: live names, and the packed modules and renamed prefixes that the model class
declares, come with the worker's description. A name that reaches nothing known gets no target; none
is ever made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.manifest import FLOATING, Manifest
from weightlane.receiver import NameEntry, WorkerDescription

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a name lands: the receiver tensor ("" when none is known) and the rules that decided."""

    target: str
    rule: str


def reach_of(
    name: str,
    live: AbstractSet[str],
    packed: Mapping[str, Sequence[str]],
    renames: Mapping[str, str],
) -> Reach:
    """Follows `name` through renamed prefixes, packed modules and the LoRA wrapper to a name in `live`."""
    rules: list[str] = []
    current = name
    for old, new in renames.items():
        if current.startswith(old):
            current = new + current[len(old) :]
            rules.append(f"prefix {old} is {new or 'dropped'}")
            break
    module, _, leaf = current.rpartition(".")
    holder, _, piece = module.rpartition(".")
    fused = next((whole for whole, pieces in packed.items() if piece in pieces), "")
    candidates = [(module, "")]
    if fused:
        # The fused module first: a class may declare a packing that one of its modules does not use.
        candidates.insert(0, (f"{holder}.{fused}" if holder else fused, f"packed into {fused}"))
    for path, packing in candidates:
        for inner, wrapping in (("", ""), (".base_layer", "inside its LoRA wrapper")):
            target = f"{path}{inner}.{leaf}" if path else leaf
            if target in live:
                rules.extend(rule for rule in (packing, wrapping) if rule)
                return Reach(target, ", ".join(rules) or "same name")
    return Reach("", UNKNOWN)


def map_names(manifest: Manifest, worker: WorkerDescription) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order.

    What travels has the receiver's dtype where both are floating, so that a narrower receiver costs no
    needless bytes; any other difference is left as it is, for the plan to refuse.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in worker.live}
    expected = {tensor.name: tensor for tensor in worker.expected}
    entries: list[NameEntry] = []
    for spec in manifest.tensors:
        wanted = expected.get(spec.name)
        if wanted is not None and wanted.tied_to:
            entries.append(
                NameEntry(
                    spec.name,
                    spec.name,
                    spec.dtype,
                    rule="tied",
                    dropped=f"the receiver reads {wanted.tied_to} for it",
                )
            )
            continue
        reach = reach_of(spec.name, dtypes.keys(), worker.packed, worker.renames)
        dtype = dtypes.get(reach.target, spec.dtype)
        entries.append(
            NameEntry(
                canonical=spec.name,
                wire=spec.name,
                dtype=dtype if {dtype, spec.dtype} <= FLOATING else spec.dtype,
                targets=(reach.target,) if reach.target else (),
                rule=reach.rule,
            )
        )
    return tuple(entries)
