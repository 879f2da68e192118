"""The static name map: from a checkpoint name to the name that travels and the receiver tensor it reaches.

No engine and no torch here: live names and whatever the model class declares come with the worker's
description. A name that reaches nothing known gets no target; none is ever made up. Where a worker can be
reached, the trace of its loader says the same by evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.manifest import FLOATING, Manifest
from weightlane.receiver import UNKNOWN, NameEntry, WorkerDescription
from weightlane_vllm.namespace import Landing, Namespace
from weightlane_vllm.wrapped import needs_spelling, spell

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDER_SPELLINGS = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""transformers 4.52 moved both towers of vision models below `model.`
(https://github.com/vllm-project/vllm/issues/19149); a model class from before it knows the second form
alone. Tried only for a name that reaches nothing as it is."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The name that travels, the receiver tensor it reaches ("" when none is known), the rules that decided.

    `shard` is the part of a fused tensor: `q`, `gate`, an expert's `w3`; "" for all of it.
    """

    wire: str
    target: str
    rule: str
    shard: str = ""


def resolve(name: str, space: Namespace) -> Resolved:
    """Decides one name; resolving what travels gives it again."""
    own = ""
    for spelling, rule in _spellings(name):
        wire = spell(spelling, space) if needs_spelling(spelling, space) else spelling
        own = own or wire
        landing: Landing | None = space.land(wire)
        if landing is not None:
            rules = [item for item in (rule, landing.rule) if item]
            return Resolved(wire, landing.target, ", ".join(rules), landing.shard)
    return Resolved(own, "", UNKNOWN)


def is_taken(wire: str, space: Namespace) -> bool:
    """Whether a name that travels is known to reach a live tensor in this very spelling.

    A loader may accept another spelling and write nothing.
    """
    found = resolve(wire, space)
    return bool(found.target) and found.wire == wire


def _spellings(name: str) -> Iterator[tuple[str, str]]:
    yield name, ""
    for newer, older in OLDER_SPELLINGS:
        if name.startswith(newer):
            yield older + name[len(newer) :], f"{newer} is {older} to this model class"


def map_names(manifest: Manifest, worker: WorkerDescription) -> tuple[NameEntry, ...]:
    """One entry per exported tensor, in manifest order.

    What travels has the receiver's dtype where both are floating, so that a narrower receiver costs no
    needless bytes; any other difference is left as it is, for the plan to refuse.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in worker.live}
    expected = {tensor.name: tensor for tensor in worker.expected}
    space = Namespace.of(worker)
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
        found = resolve(spec.name, space)
        dtype = dtypes.get(found.target, spec.dtype)
        entries.append(
            NameEntry(
                canonical=spec.name,
                wire=found.wire,
                dtype=dtype if {dtype, spec.dtype} <= FLOATING else spec.dtype,
                targets=(found.target,) if found.target else (),
                rule=found.rule,
            )
        )
    return tuple(entries)
