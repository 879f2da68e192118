"""The probes of the eras, over facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.probes import NotViable, ProbeResult, Viable, require_request_fields
from weightlane_sglang.contract import (
    BEGIN_UPDATE_ROUTE,
    END_UPDATE_ROUTE,
    FIELDS_USED,
    FLUSH_ROUTE,
    ROUTES_USED,
    SELECTOR_FIELD,
    SESSION_FIELDS_USED,
    SESSION_ROUTES_USED,
    UNTIMED_FIELDS_USED,
    UNTIMED_ROUTES_USED,
    UPDATE_REQUEST,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.facts import EngineFacts

FLUSH_TIMEOUT = "timeout"


def probe_untimed_flush(facts: EngineFacts) -> ProbeResult:
    """As the era after it, but that a flush answers at once whether it was done (0.5.0 to 0.5.9)."""
    if FLUSH_TIMEOUT in facts.request_fields.get(FLUSH_ROUTE, ()):
        return NotViable(
            f"{FLUSH_ROUTE} takes {FLUSH_TIMEOUT}: since 0.5.10 the server itself waits for idleness"
        )
    in_session = _why_in_session(facts)
    if in_session:
        return NotViable(in_session)
    evidence = f"{FLUSH_ROUTE} takes no {FLUSH_TIMEOUT}: it is asked until the server is idle"
    return _listed(facts, UNTIMED_FIELDS_USED, UNTIMED_ROUTES_USED, evidence)


def probe_updates_without_session(facts: EngineFacts) -> ProbeResult:
    """One request a bucket, no session around it, one payload per tensor-parallel rank (0.5.10 to 0.5.20)."""
    in_session = _why_in_session(facts)
    if in_session:
        return NotViable(in_session)
    return _listed(facts, FIELDS_USED, ROUTES_USED, f"no {BEGIN_UPDATE_ROUTE}: updates need no session")


def _why_in_session(facts: EngineFacts) -> str:
    if BEGIN_UPDATE_ROUTE in facts.routes:
        return (
            f"the server has {BEGIN_UPDATE_ROUTE}: since 0.5.21 weights are only taken inside a session, "
            "which this era does not open"
        )
    if SELECTOR_FIELD in facts.request_fields.get(UPDATE_REQUEST, ()):
        return f"{UPDATE_REQUEST} has the field selector, which came with update sessions in 0.5.21"
    return ""


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
