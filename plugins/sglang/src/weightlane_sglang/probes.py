"""The probe of this era, over facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.probes import NotViable, ProbeResult, Viable, require_request_fields
from weightlane_sglang.contract import BEGIN_UPDATE_ROUTE, FIELDS_USED, ROUTES_USED, UPDATE_REQUEST

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts


def probe_updates_without_session(facts: EngineFacts) -> ProbeResult:
    """One request a bucket, no session around it, one payload per tensor-parallel rank (0.5.17 to 0.5.20)."""
    if BEGIN_UPDATE_ROUTE in facts.routes:
        return NotViable(
            f"the server has {BEGIN_UPDATE_ROUTE}: since 0.5.21 weights are only taken inside a session, "
            "which this era does not open"
        )
    if "selector" in facts.request_fields.get(UPDATE_REQUEST, ()):
        return NotViable(
            f"{UPDATE_REQUEST} has the field selector, which came with update sessions in 0.5.21"
        )
    evidence: list[str] = []
    for request, fields in FIELDS_USED.items():
        verdict = require_request_fields(facts, request, fields)
        if isinstance(verdict, NotViable):
            return verdict
        evidence.extend(verdict.evidence)
    missing = [route for route in ROUTES_USED if route not in facts.routes]
    if missing:
        return NotViable(f"the server has no route {', '.join(missing)}")
    evidence.append(f"no {BEGIN_UPDATE_ROUTE}: updates need no session")
    return Viable(tuple(evidence))
