"""Probe results: a verdict over facts, with what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts


@dataclass(frozen=True, slots=True)
class Viable:
    """The backend fits these facts; `evidence` says what was seen, one line each."""

    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotViable:
    """The backend does not fit; `reason` says what is missing and, where known, since when it exists."""

    reason: str


ProbeResult: TypeAlias = Viable | NotViable


def always_viable(facts: EngineFacts) -> ProbeResult:
    """The probe of a backend whose version range alone decides."""
    return Viable((f"{facts.engine} {facts.version or 'of no stated version'} needs no probe",))


def require_request_fields(facts: EngineFacts, request: str, fields: tuple[str, ...]) -> ProbeResult:
    """Viable when `request` lists every name in `fields`; else names the missing ones and those found."""
    found = facts.request_fields.get(request)
    if found is None:
        known = ", ".join(sorted(facts.request_fields)) or "none"
        return NotViable(f"request type {request} is not described by the engine (described: {known})")
    missing = [name for name in fields if name not in found]
    if missing:
        return NotViable(f"{request} has no field {', '.join(missing)} (it has {', '.join(found)})")
    return Viable((f"{request} has {', '.join(fields)}",))


def require_attributes(facts: EngineFacts, attributes: tuple[str, ...]) -> ProbeResult:
    """Viable when every attribute was looked for and is there."""
    unasked = [name for name in attributes if name not in facts.attributes]
    if unasked:
        return NotViable(f"nobody looked for {', '.join(unasked)} in this engine (facts from {facts.source})")
    absent = [name for name in attributes if not facts.attributes[name]]
    if absent:
        return NotViable(f"the engine does not define {', '.join(absent)}")
    return Viable(tuple(f"{name} is defined" for name in attributes))
