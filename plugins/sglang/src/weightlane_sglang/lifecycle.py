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
from weightlane_sglang.memory_plan import memory_notes, plan_memory
from weightlane_sglang.probes import FLUSH_TIMEOUT
from weightlane_sglang.requests import json_body, require_fields
from weightlane_sglang.running_requests import PAUSE_NOTES, pause_fields, policy_of
from weightlane_sglang.server_facts import STARTUP_TIMES

if TYPE_CHECKING:
    from weightlane.contexts import BuildRequestsContext
    from weightlane.facts import EngineFacts

FLUSH_IDLE_SECONDS = 30
_CALL_SECONDS = 60.0
_ENCODED = (
    "SGLang keeps what the model's encoders made of an image or a sound, and no request empties that: an "
    "input seen before a sync is answered with what the old weights made of it, unless the server was "
    "started with "
    f"{ENCODER_CACHE_VARIABLE}=0"
)


def plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    """Pause, flush once idle, publish, continue; with memory to manage, wait for idleness after the pause.

    A release in a server that is not idle ends it, and only a flush says that it is. New requests wait at the
    server from the pause until it continues. Without one they would run between two buckets, on half-written
    weights, since the server's writer lock is held for one request at a time.

    Raises:
        PlanError: the server's pause does not do what was asked for, or it cannot let that memory go.
    """
    require_fields(context.facts, FLUSH_ROUTE, (FLUSH_TIMEOUT,))
    route = f"{FLUSH_ROUTE}?{FLUSH_TIMEOUT}={FLUSH_IDLE_SECONDS}"
    return lifecycle_around(context, EngineCall(route, timeout_seconds=FLUSH_IDLE_SECONDS + 30.0))


def lifecycle_around(context: BuildRequestsContext, flush: EngineCall) -> Lifecycle:
    """The lifecycle with this era's way to flush once the server is idle."""
    facts = context.facts
    policy = policy_of(context)
    pause = EngineCall(
        PAUSE_ROUTE,
        json_body(facts, PAUSE_REQUEST, pause_fields(facts, policy)),
        timeout_seconds=_CALL_SECONDS,
    )
    return Lifecycle(
        pause=(pause, flush) if context.release else (pause,),
        settle=(flush,),
        publish=(
            EngineCall(
                VERSION_ROUTE,
                json_body(facts, VERSION_REQUEST, {"abort_all_requests": False}),
                version_field=_version_field(context),
                timeout_seconds=_CALL_SECONDS,
            ),
        ),
        resume=(EngineCall(CONTINUE_ROUTE, timeout_seconds=_CALL_SECONDS),),
        notes=(
            PAUSE_NOTES[policy],
            *((_ENCODED,) if facts.attributes.get(ENCODES) else ()),
            *memory_notes(facts, context.release),
            *_restart_notes(facts),
        ),
        memory=plan_memory(facts, context.release),
        requests=policy,
    )


def _restart_notes(facts: EngineFacts) -> tuple[str, ...]:
    if facts.attributes.get(STARTUP_TIMES, True):
        return ()
    note = (
        f"SGLang {facts.version} tells no start-up times: a new start shows in its random seed alone, so "
        "that it must be started without --random-seed"
    )
    return (note,)


def _version_field(context: BuildRequestsContext) -> str:
    require_fields(context.facts, VERSION_REQUEST, (VERSION_FIELD,))
    return VERSION_FIELD
