"""Names: SGLang's loader takes Hugging Face checkpoint names as they are, and ignores any other silently."""

from __future__ import annotations

from weightlane.manifest import FLOATING, Manifest
from weightlane.receiver import NameEntry, WorkerDescription

UNKNOWN = "unknown"
CHECKPOINT_NAME = "checkpoint name, fused and sharded by the server's loader"


def map_names(manifest: Manifest, worker: WorkerDescription) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order.

    What travels has the server's dtype where both are floating. No target is named: nobody looked into the
    server. A name that its checkpoint lacks gets the rule `unknown`, for the plan to refuse.
    """
    expected = {tensor.name: tensor for tensor in worker.expected}
    entries: list[NameEntry] = []
    for spec in manifest.tensors:
        wanted = expected.get(spec.name)
        if wanted is None:
            entries.append(NameEntry(spec.name, spec.name, spec.dtype, rule=UNKNOWN))
        elif wanted.tied_to:
            entries.append(
                NameEntry(
                    spec.name,
                    spec.name,
                    spec.dtype,
                    rule="tied",
                    dropped=f"the server reads {wanted.tied_to} for it",
                )
            )
        else:
            both = {wanted.dtype, spec.dtype}
            dtype = wanted.dtype if both <= FLOATING else spec.dtype
            entries.append(NameEntry(spec.name, spec.name, dtype, rule=CHECKPOINT_NAME))
    return tuple(entries)
