"""What surrounds the move: generation held back, caches flushed, the version published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.program import EngineCall, Lifecycle
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    ENCODER_CACHE_VARIABLE,
    ENCODES,
    FLUSH_ROUTE,
    PAUSE_REQUEST,
    PAUSE_ROUTE,
    VERSION_FIELD,
    VERSION_REQUEST,
    VERSION_ROUTE,
)
from weightlane_sglang.requests import json_body, require_fields

if TYPE_CHECKING:
    from weightlane.contexts import BuildRequestsContext

FLUSH_IDLE_SECONDS = 30
_CALL_SECONDS = 60.0
_ABORTS = "the pause aborts requests in flight; await them before a sync to keep them whole"
_ENCODED = (
    "SGLang keeps what the model's encoders made of an image or a sound, and no request empties that: an "
    "input seen before a sync is answered with what the old weights made of it, unless the server was "
    "started with "
    f"{ENCODER_CACHE_VARIABLE}=0"
)


def plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    """Pause by abort, flush once idle, publish, continue.

    `abort` is the one pause after which the cache can be flushed: `in_place` and `retract` keep their
    requests in the scheduler, so it never gets idle, and caches made by the old weights would serve on. New
    requests wait at the server until it continues. Without a pause they would run between two buckets, on
    half-written weights, since the server's writer lock is held for one request at a time.
    """
    facts = context.facts
    require_fields(facts, FLUSH_ROUTE, ("timeout",))
    return Lifecycle(
        pause=(
            EngineCall(
                PAUSE_ROUTE,
                json_body(facts, PAUSE_REQUEST, {"mode": "abort"}),
                timeout_seconds=_CALL_SECONDS,
            ),
        ),
        settle=(
            EngineCall(
                f"{FLUSH_ROUTE}?timeout={FLUSH_IDLE_SECONDS}", timeout_seconds=FLUSH_IDLE_SECONDS + 30.0
            ),
        ),
        publish=(
            EngineCall(
                VERSION_ROUTE,
                json_body(facts, VERSION_REQUEST, {"abort_all_requests": False}),
                version_field=_version_field(context),
                timeout_seconds=_CALL_SECONDS,
            ),
        ),
        resume=(EngineCall(CONTINUE_ROUTE, timeout_seconds=_CALL_SECONDS),),
        notes=(_ABORTS, _ENCODED) if facts.attributes.get(ENCODES) else (_ABORTS,),
        requests="abort",
    )


def _version_field(context: BuildRequestsContext) -> str:
    require_fields(context.facts, VERSION_REQUEST, (VERSION_FIELD,))
    return VERSION_FIELD
