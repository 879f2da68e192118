"""Memory that a lane has SGLang let go and take back, planned from how the server says it was started.

Each request names one tag. A request without tags means all of them, and one that resumes what is not
released ends the whole server: its scheduler removes the tag from a set that does not hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weightlane.errors import PlanError, Problem
from weightlane.program import EngineCall, MemoryCalls
from weightlane_sglang.contract import (
    RELEASE_REQUEST,
    RELEASE_ROUTE,
    RESUME_REQUEST,
    RESUME_ROUTE,
    TAGS_FIELD,
)
from weightlane_sglang.requests import json_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.facts import EngineFacts
    from weightlane.types import MemoryTag

_SECONDS = 120.0  # weights may have to travel to the host


def plan_memory(facts: EngineFacts, release: Sequence[MemoryTag]) -> tuple[MemoryCalls, ...]:
    """The calls for each tag of `release`.

    Raises:
        PlanError: the server has no such route or does not list the tags, or would lose its adapters.
    """
    if not release:
        return ()
    missing = [route for route in (RELEASE_ROUTE, RESUME_ROUTE) if route not in facts.routes]
    if missing:
        what = f"SGLang {facts.version} has no route {', '.join(missing)}"
        raise PlanError([Problem("release", tag, what, "Leave release= out.") for tag in release])
    if (
        "weights" in release
        and _contents(facts) == "lost"
        and facts.launch_arguments.get("enable_lora") == "true"
    ):
        what = "SGLang frees its weights without a copy, and the slots of its adapters may lie among them"
        fix = 'Start it with --enable-weights-cpu-backup, or release "kv_cache" alone.'
        raise PlanError([Problem("release", "weights", what, fix)])
    return tuple(_calls(facts, tag) for tag in release)


def frees_memory(facts: EngineFacts) -> bool:
    """Whether the server was started with what makes a release free anything."""
    return facts.launch_arguments.get("enable_memory_saver") == "true"


def memory_notes(facts: EngineFacts, release: Sequence[MemoryTag]) -> tuple[str, ...]:
    """What to know of the release that was planned."""
    if not release:
        return ()
    if not frees_memory(facts):
        told = facts.launch_arguments.get("enable_memory_saver", "nothing")
        return (
            (
                f"releasing {' and '.join(release)} frees no memory: /server_info tells enable_memory_saver "
                f"{told}; SGLang keeps track of it all the same (start it with --enable-memory-saver)"
            ),
        )
    if "weights" not in release:
        return ()
    if _contents(facts) == "kept":
        return ("while the server sleeps a copy of its weights is on the host (--enable-weights-cpu-backup)",)
    return ("while the server sleeps its weights are lost, and the next sync writes them",)


def _contents(facts: EngineFacts) -> Literal["kept", "lost"]:
    backed_up = facts.launch_arguments.get("enable_weights_cpu_backup") == "true"
    return "kept" if backed_up or not frees_memory(facts) else "lost"


def _calls(facts: EngineFacts, tag: MemoryTag) -> MemoryCalls:
    tags = {TAGS_FIELD: [tag]}
    return MemoryCalls(
        tag,
        EngineCall(RELEASE_ROUTE, json_body(facts, RELEASE_REQUEST, tags), timeout_seconds=_SECONDS),
        EngineCall(RESUME_ROUTE, json_body(facts, RESUME_REQUEST, tags), timeout_seconds=_SECONDS),
        contents=_contents(facts) if tag == "weights" else "lost",
    )
