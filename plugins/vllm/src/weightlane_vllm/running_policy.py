"""What a sync does with requests that run in an `AsyncLLM`; in an `LLM` none runs between two calls of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.program import EngineCall
from weightlane.types import Phase
from weightlane_vllm.facts import ENCODES, PAUSES
from weightlane_vllm.requests import FENCE_NOTE, RESET_PREFIX_CACHE
from weightlane_vllm.routes import (
    ABORT_OLD_ADAPTERS,
    DRAIN_OLD_ADAPTERS,
    PAUSE_ABORT,
    PAUSE_DRAIN,
    PAUSE_KEEP,
    RESET_ENCODER_CACHE,
    RESET_OF_RUNNING,
    RESUME,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import BuildRequestsContext
    from weightlane.program import Lifecycle
    from weightlane.types import RequestPolicy

_PAUSES: dict[RequestPolicy, str] = {"drain": PAUSE_DRAIN, "abort": PAUSE_ABORT, "keep": PAUSE_KEEP}
_CALL_SECONDS = 60.0

_NOTES: dict[RequestPolicy, str] = {
    "drain": "vLLM pauses once the requests that run have ended; those that come meanwhile wait until the "
    "version is published",
    "abort": "vLLM's pause aborts the requests that run: they end unfinished; those that come meanwhile wait "
    "until the version is published",
    "keep": "vLLM's pause freezes the requests that run; they go on with the new weights, so that one answer "
    "may be of two versions",
}
_BESIDE_NOTE = (
    "Requests keep the adapter that they name; the one before is removed once none names it, which the next "
    "sync {verb}. New requests that name it are refused."
)


def with_running_requests(context: BuildRequestsContext, lifecycle: Lifecycle) -> Lifecycle:
    """The lifecycle of an engine whose requests run on while calls are made.

    Its caches are emptied after the commit, while the engine still pauses. An `LLM` has nothing to pause, and
    its caches are emptied in the sync. What encoders made of an image or a sound is cached by its hash alone:
    vLLM's prefix cache is not all that holds what old weights computed (`EngineCore.reset_encoder_cache`).
    """
    encoders = (RESET_ENCODER_CACHE,) if context.facts.attributes.get(ENCODES) else ()
    if not context.facts.attributes.get(PAUSES):
        settle = (*lifecycle.settle, *_resets(encoders))
        return replace(lifecycle, settle=settle, requests="drain")
    policy: RequestPolicy = context.requests or "drain"
    notes = tuple(note for note in lifecycle.notes if note != FENCE_NOTE)
    settle = tuple(call for call in lifecycle.settle if call.route != RESET_PREFIX_CACHE)
    if context.phase is Phase.ADAPTER and context.swap == "two_slot":
        return _beside(context, replace(lifecycle, notes=notes, settle=settle), policy)
    reset = RESET_OF_RUNNING if policy == "keep" else RESET_PREFIX_CACHE
    seconds = context.drain_seconds if policy == "drain" else _CALL_SECONDS
    return replace(
        lifecycle,
        pause=(EngineCall(_PAUSES[policy], timeout_seconds=seconds), *lifecycle.pause),
        settle=settle,
        publish=(*lifecycle.publish, *_resets((reset, *encoders))),
        resume=(*lifecycle.resume, EngineCall(RESUME, timeout_seconds=_CALL_SECONDS)),
        notes=(*notes, _NOTES[policy]),
        requests=policy,
    )


def _resets(routes: Sequence[str]) -> tuple[EngineCall, ...]:
    return tuple(EngineCall(route, timeout_seconds=_CALL_SECONDS) for route in routes)


def _beside(context: BuildRequestsContext, lifecycle: Lifecycle, policy: RequestPolicy) -> Lifecycle:
    """An adapter is loaded beside those that serve. `keep` cannot be kept: the slot is needed again."""
    abort = policy == "abort"
    call = EngineCall(
        ABORT_OLD_ADAPTERS if abort else DRAIN_OLD_ADAPTERS,
        timeout_seconds=_CALL_SECONDS if abort else context.drain_seconds,
    )
    return replace(
        lifecycle,
        pause=(call, *lifecycle.pause),
        notes=(*lifecycle.notes, _BESIDE_NOTE.format(verb="enforces by aborts" if abort else "waits for")),
        requests="abort" if abort else "drain",
    )
