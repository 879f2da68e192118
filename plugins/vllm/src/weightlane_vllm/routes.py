"""The calls of a front by name, as a sync's schedule shows them: what `EngineCall.route` may say."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from weightlane.errors import EngineError
from weightlane_vllm.requests import RESET_PREFIX_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightlane_vllm.adapter_turnover import AdapterTurnover
    from weightlane_vllm.engine_calls import EngineCalls, PauseMode
    from weightlane_vllm.sleep_calls import EngineMemory

PAUSE_DRAIN = "pause_generation:wait"
PAUSE_ABORT = "pause_generation:abort"
PAUSE_KEEP = "pause_generation:keep"
RESUME = "resume_generation"
RESET_OF_RUNNING = "reset_prefix_cache:recompute_running"
RESET_ENCODER_CACHE = "reset_encoder_cache"
DRAIN_OLD_ADAPTERS = "old_adapters:wait"
ABORT_OLD_ADAPTERS = "old_adapters:abort"


class Routes:
    """Makes calls by name.

    Args:
        calls: on the engine.
        turnover: of its adapters, where requests run beside syncs and name adapters.
        memory: of the engine.
    """

    def __init__(self, calls: EngineCalls, turnover: AdapterTurnover | None, memory: EngineMemory) -> None:
        self._calls = calls
        self._turnover = turnover
        self._known: Mapping[str, Callable[[float], str]] = {
            RESET_PREFIX_CACHE: self._reset,
            RESET_OF_RUNNING: self._reset_of_running,
            RESET_ENCODER_CACHE: self._reset_encoder,
            PAUSE_DRAIN: lambda seconds: self._pause("wait", seconds),
            PAUSE_ABORT: lambda seconds: self._pause("abort", seconds),
            PAUSE_KEEP: lambda seconds: self._pause("keep", seconds),
            RESUME: self._resume,
            DRAIN_OLD_ADAPTERS: self._drain_old,
            ABORT_OLD_ADAPTERS: self._abort_old,
            **{route: functools.partial(memory.call, route) for route in memory.ROUTES},
        }

    def call(self, route: str, seconds: float) -> str:
        """What was done, in words.

        Raises:
            EngineError: there is no such call, vLLM failed in it, or said that it did not do it.
        """
        known = self._known.get(route)
        if known is None:
            raise EngineError(
                f"Backend vllm has no call {route!r}.", f"It has {', '.join(self._known)}.", "Connect again."
            )
        return known(seconds)

    def _reset(self, seconds: float) -> str:
        return require_reset(self._calls.reset_prefix_cache(seconds))

    def _reset_of_running(self, seconds: float) -> str:
        return require_reset(self._calls.reset_prefix_cache_of_running(seconds))

    def _reset_encoder(self, seconds: float) -> str:
        self._calls.reset_encoder_cache(seconds)
        return "reset"

    def _pause(self, mode: PauseMode, seconds: float) -> str:
        try:
            self._calls.pause(mode, seconds)
        except EngineError as error:
            raise error.adding(
                "Requests that run are waited for (requests='drain'); bounds.drain says how long."
                if mode == "wait"
                else f"Generation was to be paused, mode {mode}."
            ) from error
        return "paused"

    def _resume(self, seconds: float) -> str:
        ended = self._turnover.before_resume(seconds) if self._turnover else 0
        self._calls.resume(seconds)
        return f"resumed; {ended} requests whose adapter is gone were aborted" if ended else "resumed"

    def _drain_old(self, seconds: float) -> str:
        if self._turnover:
            self._turnover.drain(seconds)
        return "drained"

    def _abort_old(self, seconds: float) -> str:
        if self._turnover:
            self._turnover.abort(seconds)
        return "aborted"


def require_reset(done: bool) -> str:
    """What was done, in a word; raises EngineError where vLLM says that it was not."""
    if not done:
        raise EngineError(
            "vLLM did not reset its prefix cache.",
            "Blocks of running requests are still in use, so later prompts could meet keys and values of "
            "the old weights.",
            "Sync when no request runs.",
        )
    return "reset"
