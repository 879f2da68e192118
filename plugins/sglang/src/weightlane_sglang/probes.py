"""The probes of both eras, over facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.probes import NotViable, ProbeResult, Viable, require_request_fields
from weightlane_sglang.contract import (
    BEGIN_UPDATE_ROUTE,
    END_UPDATE_ROUTE,
    FIELDS_USED,
    ROUTES_USED,
    SELECTOR_FIELD,
    SESSION_FIELDS_USED,
    SESSION_ROUTES_USED,
    UPDATE_REQUEST,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.facts import EngineFacts


def probe_updates_without_session(facts: EngineFacts) -> ProbeResult:
    """One request a bucket, no session around it, one payload per tensor-parallel rank (0.5.17 to 0.5.20)."""
    if BEGIN_UPDATE_ROUTE in facts.routes:
        return NotViable(
            f"the server has {BEGIN_UPDATE_ROUTE}: since 0.5.21 weights are only taken inside a session, "
            "which this era does not open"
        )
    if SELECTOR_FIELD in facts.request_fields.get(UPDATE_REQUEST, ()):
        return NotViable(
            f"{UPDATE_REQUEST} has the field selector, which came with update sessions in 0.5.21"
        )
    return _listed(facts, FIELDS_USED, ROUTES_USED, f"no {BEGIN_UPDATE_ROUTE}: updates need no session")


def probe_updates_in_session(facts: EngineFacts) -> ProbeResult:
    """One request a bucket between a begin and an end, for the target model (0.5.21 and later)."""
    if BEGIN_UPDATE_ROUTE not in facts.routes:
        return NotViable(f"the server has no {BEGIN_UPDATE_ROUTE}: updates need no session before 0.5.21")
    evidence = f"{BEGIN_UPDATE_ROUTE} and {END_UPDATE_ROUTE}: updates need a session"
    return _listed(facts, SESSION_FIELDS_USED, SESSION_ROUTES_USED, evidence)


def _listed(
    facts: EngineFacts, fields_used: Mapping[str, tuple[str, ...]], routes: Sequence[str], reason: str
) -> ProbeResult:
    evidence: list[str] = []
    for request, fields in fields_used.items():
        verdict = require_request_fields(facts, request, fields)
        if isinstance(verdict, NotViable):
            return verdict
        evidence.extend(verdict.evidence)
    missing = [route for route in routes if route not in facts.routes]
    if missing:
        return NotViable(f"the server has no route {', '.join(missing)}")
    return Viable((*evidence, reason))
