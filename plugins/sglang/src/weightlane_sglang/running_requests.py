"""What a pause does with requests that run in SGLang, and which of it means what a lane was asked for.

`abort` ends them. `retract` puts them back into the queue, from where they are computed anew with the new
weights: that is `keep`, where the server can flush its cache beside such a queue, as it does since 0.5.21.
Before, a flush waits for the queue to be empty, which it never is while the server pauses: prefixes computed
by the old weights would serve on. `in_place` leaves old keys and values even under the requests that go on.
No mode lets running requests end while it holds back new ones, so there is no `drain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem
from weightlane_sglang.contract import PAUSE_REQUEST
from weightlane_sglang.requests import require_fields
from weightlane_sglang.session import wants_session

if TYPE_CHECKING:
    from weightlane.contexts import BuildRequestsContext
    from weightlane.facts import EngineFacts
    from weightlane.types import RequestPolicy

MODE_FIELD = "mode"
PAUSE_MODES: dict[RequestPolicy, str] = {"abort": "abort", "keep": "retract"}
PAUSE_NOTES: dict[RequestPolicy, str] = {
    "abort": "the pause aborts requests in flight; await them before a sync to keep them whole",
    "keep": "the pause puts requests in flight back into the queue; they go on with the new weights, their "
    "keys and values computed anew, so that one answer may be of two versions",
}


def policy_of(context: BuildRequestsContext) -> RequestPolicy:
    """The policy asked for, or `abort` where none was.

    Raises:
        PlanError: this server has no pause that does what was asked for; says which it has.
    """
    policy = context.requests or "abort"
    why = _why_not(context.facts, policy)
    if why:
        both = "abort' or 'keep" if not _why_not(context.facts, "keep") else "abort"
        fix = f"Connect with requests='{both}', or wait for your requests before each sync."
        raise PlanError([Problem("running-requests", f"requests={policy!r}", why, fix)])
    return policy


def _why_not(facts: EngineFacts, policy: RequestPolicy) -> str:
    if policy == "drain":
        return (
            "SGLang has no pause that waits for running requests to end while it holds back new ones (its "
            "modes are abort, retract and in_place)"
        )
    if policy == "keep":
        if MODE_FIELD not in facts.request_fields.get(PAUSE_REQUEST, ()):
            return f"the pause of SGLang {facts.version} takes no mode and aborts what runs"
        if not wants_session(facts):
            return (
                f"SGLang {facts.version} flushes no cache while requests wait in its queue, so that prefixes "
                "of the old weights would be served after the sync; this came with update sessions in 0.5.21"
            )
    return ""


def pause_fields(facts: EngineFacts, policy: RequestPolicy) -> dict[str, object]:
    """The fields of the pause request: its mode where the server lists one, nothing where it only aborts."""
    if policy == "abort" and PAUSE_REQUEST not in facts.request_fields:
        return {}
    require_fields(facts, PAUSE_REQUEST, (MODE_FIELD,))
    return {MODE_FIELD: PAUSE_MODES[policy]}
