"""Letting memory of a live vLLM go and taking it back, tag by tag, through its own `sleep` and `wake_up`.

vLLM answers a call that it ignores (a second sleep, a tag that is not asleep, any call on a CPU build) as one
that it obeyed, with a line in its log. So the workers are asked before each call and after it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from weightlane.errors import EngineError, NotServableError
from weightlane.failures import Failure, error_of, failure_of
from weightlane.messages import decode, encode
from weightlane_vllm.sleep_plan import RELEASE_KV_CACHE, RELEASE_WEIGHTS, RESUME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.types import MemoryTag
    from weightlane_vllm.engine_calls import EngineCalls

_METHOD = "weightlane_sleep"


class SleepState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sleep-state"):
    """What one worker has released, and why its weights are lost ("" while they are not)."""

    released: tuple[str, ...] = ()
    lost: str = ""


_Answer: TypeAlias = SleepState | Failure


def tell_sleep(worker: Any) -> bytes:
    """One worker's answer, encoded; never raises."""
    try:
        from weightlane_vllm.sleep_watch import watch_of

        watch = watch_of(worker)
        return encode(SleepState(watch.released(), watch.why_lost()))
    except Exception as error:  # noqa: BLE001 - the front must hear of it, whatever it is
        return encode(failure_of(error, origin=f"worker {worker.rank}"))


class EngineMemory:
    """The memory of one engine; one call of it at a time.

    Args:
        calls: the engine.
        cache_alone: whether it can let its key-value cache go without its weights.
    """

    ROUTES = (*RELEASE_WEIGHTS, RELEASE_KV_CACHE, *RESUME)

    def __init__(self, calls: EngineCalls, *, cache_alone: bool) -> None:
        self._calls = calls
        self._cache_alone = cache_alone
        self._cache_went_along = False
        # Bounded by the seconds of the call that waits for it; see `call`.
        self._busy = threading.Lock()

    def call(self, route: str, seconds: float) -> str:
        """One of `ROUTES`, each step of it within `seconds`; tells what is released afterwards.

        Raises:
            EngineError: a tag that is released already or is not, the cache before the weights, an engine
                that did not do what it was told, or another call of this kind still runs.
        """
        if not self._busy.acquire(timeout=seconds):
            raise EngineError(f"{route} waited {seconds:g} s for another sleep or wake of this vLLM.")
        try:
            released = self._released(seconds)
            if route in RESUME:
                after = self._resume(RESUME[route], released, seconds)
            elif route == RELEASE_KV_CACHE:
                after = self._release_cache(released, seconds)
            else:
                after = self._release_weights(RELEASE_WEIGHTS[route], released, seconds)
            told = self._released(seconds)
        finally:
            self._busy.release()
        if told != after:
            raise EngineError(
                f"vLLM did not do what {route} asks: {_named(told)} is released, {_named(after)} should be.",
                "Its own call returned without an error; its log says why it ignored it.",
                "Let one side alone, the lane or its user, put this engine to sleep.",
            )
        return f"released: {_named(told)}"

    def require_awake(self, seconds: float) -> None:
        """Raises NotServableError while memory is released, or lost weights are not written again."""
        states = self._states(seconds)
        released = sorted({tag for state in states for tag in state.released})
        if released:
            raise NotServableError(
                "vLLM sleeps and does not generate.",
                f"It has released {', '.join(released)}.",
                "Wake it, or sync a lane that manages them.",
            )
        lost = next((state.lost for state in states if state.lost), "")
        if lost:
            raise NotServableError("vLLM is awake and has no weights.", lost, "Run a full sync.")

    def _release_weights(self, level: int, released: set[str], seconds: float) -> set[str]:
        _require("weights", released, wanted=False)
        if "kv_cache" in released and not self._cache_alone:
            self._calls.wake_up(["kv_cache"], seconds)  # it ignores a sleep while any memory is released
        self._cache_went_along = "kv_cache" not in released
        self._calls.sleep(level, seconds)
        return {"weights", "kv_cache"}

    def _release_cache(self, released: set[str], seconds: float) -> set[str]:
        if self._cache_went_along and "weights" in released:
            self._cache_went_along = False
            return released
        _require("kv_cache", released, wanted=False)
        if not self._cache_alone:
            self._calls.sleep(1, seconds)
            self._calls.wake_up(["weights"], seconds)
            return {"kv_cache"}
        self._calls.sleep(0, seconds)
        try:
            self._calls.release_kv_cache_memory(seconds)
        except BaseException:
            self._calls.wake_up(["scheduling"], seconds)
            raise
        return {"kv_cache"}

    def _resume(self, tag: MemoryTag, released: set[str], seconds: float) -> set[str]:
        _require(tag, released, wanted=True)
        if tag == "kv_cache" and "weights" in released:
            raise EngineError(
                "kv_cache cannot be resumed before weights.",
                "vLLM restores what belongs to the weights when they are woken, and generates once all is.",
                "Resume weights first.",
            )
        self._calls.wake_up([tag], seconds)
        self._cache_went_along = False
        return released - {tag}

    def _states(self, seconds: float) -> list[SleepState]:
        states: list[SleepState] = []
        for data in self._calls.collective_rpc("a question for released memory", _METHOD, (), seconds):
            answer: _Answer = decode(data, _Answer, sender="a worker")
            if isinstance(answer, Failure):
                raise error_of(answer)
            states.append(answer)
        return states

    def _released(self, seconds: float) -> set[str]:
        told = [set(state.released) for state in self._states(seconds)]
        if any(other != told[0] for other in told[1:]):
            each = "; ".join(f"worker {number} {_named(tags)}" for number, tags in enumerate(told))
            raise EngineError(
                "vLLM's workers have released different memory.",
                f"They are: {each}.",
                "A sleep or wake that failed on some of them leaves them so: start the engine again.",
            )
        return told[0]


def _require(tag: str, released: set[str], *, wanted: bool) -> None:
    if (tag in released) is wanted:
        return
    raise EngineError(
        f"{tag} cannot be {'resumed' if wanted else 'released'}: it is "
        f"{'not released' if wanted else 'released already'}.",
        "Only what was released is resumed, once.",
        "Let one side alone, the lane or its user, put this engine to sleep.",
    )


def _named(tags: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(tags, reverse=True)) or "nothing"
