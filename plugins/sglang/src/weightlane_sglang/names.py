"""Names: SGLang's loader takes Hugging Face checkpoint names as they are, and ignores any other silently."""

from __future__ import annotations

from weightlane.manifest import FLOATING, Manifest
from weightlane.receiver import UNKNOWN, NameEntry, WorkerDescription
from weightlane_sglang.spelling import landing, plain_name

CHECKPOINT_NAME = "checkpoint name, fused and sharded by the server's loader"


def map_names(manifest: Manifest, worker: WorkerDescription) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order.

    What travels has the server's dtype where both are floating. A target is named where the worker tells its
    live tensors; a server reached through requests alone tells none. A name that its checkpoint lacks gets
    the rule `unknown`, for the plan to refuse.
    """
    expected = {tensor.name: tensor for tensor in worker.expected}
    live = {tensor.name for tensor in worker.live}
    entries: list[NameEntry] = []
    for spec in manifest.tensors:
        wire = plain_name(spec.name)
        wanted = expected.get(wire)
        target, _ = landing(wire, live, worker.packed)
        if wanted is None:
            entries.append(NameEntry(spec.name, wire, spec.dtype, rule=UNKNOWN))
        elif wanted.tied_to:
            entries.append(
                NameEntry(
                    spec.name,
                    wire,
                    spec.dtype,
                    rule="tied",
                    dropped=f"the server reads {wanted.tied_to} for it",
                )
            )
        else:
            both = {wanted.dtype, spec.dtype}
            dtype = wanted.dtype if both <= FLOATING else spec.dtype
            targets = (target,) if target else ()
            entries.append(NameEntry(spec.name, wire, dtype, targets, CHECKPOINT_NAME))
    return tuple(entries)
