"""Whether a vLLM can sleep, seen from its facts, and the calls by which a lane has it do so.

vLLM's `sleep` lets go of weights and key-value cache together, at level 1 with a copy of the weights on the
host and at level 2 without one; `wake_up` takes tags. Newer engines can also let the cache go alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.errors import PlanError, Problem
from weightlane.probes import NotViable, ProbeResult, Viable, require_attributes
from weightlane.program import EngineCall, MemoryCalls
from weightlane_vllm.facts import KV_CACHE_ALONE, PAUSES, SLEEP_AVAILABLE, SLEEP_RECORDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.contexts import BuildRequestsContext
    from weightlane.facts import EngineFacts
    from weightlane.types import MemoryTag

SleepLevel: TypeAlias = Literal[1, 2]

RELEASE_WEIGHTS: Mapping[str, SleepLevel] = {"release_weights_level_1": 1, "release_weights_level_2": 2}
RELEASE_KV_CACHE = "release_kv_cache"
RESUME: Mapping[str, MemoryTag] = {"resume_weights": "weights", "resume_kv_cache": "kv_cache"}

_SECONDS = 120.0  # weights may have to travel to the host
_BACKEND = "cumem"
_LAUNCH = "weightlane launch-args vllm --release kv_cache prints all of it"


def probe_sleep(facts: EngineFacts) -> ProbeResult:
    """Whether this engine lets memory go when it is told to, and what shows it: its records, or its calls."""
    if facts.device == "cpu":
        return NotViable("vLLM's sleep on a CPU build frees nothing and only logs a warning")
    known = require_attributes(facts, (SLEEP_AVAILABLE,))
    if isinstance(known, NotViable):
        return known
    if SLEEP_RECORDS not in facts.attributes:
        return NotViable(f"nobody looked for {SLEEP_RECORDS} in this engine (facts from {facts.source})")
    arguments = facts.launch_arguments
    if arguments.get("enable_sleep_mode") != "true":
        return NotViable("the engine was started without --enable-sleep-mode")
    if arguments.get("sleep_mode_backend", _BACKEND) != _BACKEND:
        return NotViable(
            f"its sleep goes through backend {arguments['sleep_mode_backend']!r}, which keeps no records of "
            "what was released"
        )
    seen = (
        f"{SLEEP_RECORDS} is defined: its records tell what sleeps"
        if facts.attributes[SLEEP_RECORDS]
        else f"{SLEEP_RECORDS} is absent: its workers' calls of sleep and wake_up are watched"
    )
    return Viable((*known.evidence, seen, "the engine was started with --enable-sleep-mode"))


def sleep_level(facts: EngineFacts) -> SleepLevel:
    """2 where a full sync writes all that is lost; 1 where something is there that none writes.

    With LoRA on that is its slots, and with a drafter that may keep its own weights all of those.
    Source: https://github.com/vllm-project/vllm/issues/39934 (level 2 and LoRA).
    """
    return 1 if _never_written(facts) else 2


def _never_written(facts: EngineFacts) -> str:
    slots = facts.launch_arguments.get("enable_lora") == "true"
    if facts.launch_arguments.get("drafter", "") in ("keeps", "if-exported"):
        return "LoRA slots and the drafter's" if slots else "the drafter's"
    return "LoRA slots" if slots else ""


def plan_memory(facts: EngineFacts, release: Sequence[MemoryTag]) -> tuple[MemoryCalls, ...]:
    """The calls for each tag of `release`. Weights come first: that releases both, as the cache's then finds.

    Raises:
        PlanError: this engine cannot sleep, or the weights are to be let go without the cache.
    """
    if not release:
        return ()
    verdict = probe_sleep(facts)
    if isinstance(verdict, NotViable):
        fix = (
            "Leave release= out."
            if facts.device == "cpu"
            else f"Start it with --enable-sleep-mode ({_LAUNCH}), or leave release= out."
        )
        raise PlanError([Problem("release", tag, verdict.reason, fix) for tag in release])
    if "kv_cache" not in release:
        what = "vLLM lets its key-value cache go with them, which the lane was not asked to take back"
        raise PlanError([Problem("release", "weights", what, 'Release "kv_cache" as well.')])
    return tuple(_CALLS[tag](sleep_level(facts)) for tag in ("weights", "kv_cache") if tag in release)


def require_no_frozen_requests(context: BuildRequestsContext) -> None:
    """Raises PlanError where requests that run are to be kept and their keys and values let go."""
    if context.release and context.requests == "keep" and context.facts.attributes.get(PAUSES):
        what = "requests are to be kept while weights change (requests='keep'), and vLLM's sleep aborts them"
        fix = "Connect with requests='drain' or 'abort', or leave release= out."
        raise PlanError([Problem("release", tag, what, fix) for tag in context.release])


def sleep_notes(facts: EngineFacts, release: Sequence[MemoryTag]) -> tuple[str, ...]:
    """What to know of the sleep that was planned."""
    notes: list[str] = []
    if "weights" in release:
        kept = {
            1: f"a copy of them stays on the host, since {_never_written(facts)} are weights too and no sync "
            "writes those",
            2: "they are lost, and the next sync writes them",
        }
        level = sleep_level(facts)
        notes.append(f"While the engine sleeps its weights are let go at level {level}: {kept[level]}.")
    if release and not facts.attributes.get(KV_CACHE_ALONE):
        notes.append(
            "This vLLM cannot let its key-value cache go alone: around each sync its weights go to the host "
            "and come back at once."
        )
    if release and facts.attributes.get(PAUSES):
        notes.append("vLLM's sleep aborts the requests that run when memory is let go.")
    return tuple(notes)


def _weights(level: SleepLevel) -> MemoryCalls:
    (release,) = (route for route, its in RELEASE_WEIGHTS.items() if its == level)
    contents: Literal["kept", "lost"] = "kept" if level == 1 else "lost"
    return MemoryCalls("weights", _call(release), _call("resume_weights"), contents=contents)


def _kv_cache(level: SleepLevel) -> MemoryCalls:
    del level  # a cache is never kept
    return MemoryCalls("kv_cache", _call(RELEASE_KV_CACHE), _call("resume_kv_cache"))


_CALLS = {"weights": _weights, "kv_cache": _kv_cache}


def _call(route: str) -> EngineCall:
    return EngineCall(route, timeout_seconds=_SECONDS)
