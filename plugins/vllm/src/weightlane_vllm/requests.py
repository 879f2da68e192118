"""The steps of one sync of this era: the agent receives, then the prefix cache is emptied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weightlane.program import AgentMove, EngineCall, Lifecycle, Program
from weightlane.types import Phase, TransportName
from weightlane_vllm.sleep_plan import plan_memory, sleep_notes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.facts import EngineFacts
    from weightlane.types import MemoryTag

RESET_PREFIX_CACHE = "reset_prefix_cache"
_RESET_SECONDS = 60.0

_AGENT_TRANSPORTS: Mapping[TransportName, Literal["shm", "cuda_ipc", "inline", "inprocess", "disk"]] = {
    TransportName.CUDA_IPC: "cuda_ipc",
    TransportName.SHM: "shm",
    TransportName.INLINE: "inline",
    TransportName.INPROCESS: "inprocess",
    TransportName.DISK: "disk",
}

FENCE_NOTE = (
    "The fence is advisory: vLLM's LLM class cannot hold generation back, so only what is generated through "
    "weightlane's front is refused while weights are half-written."
)


def build_program(transport: TransportName) -> Program:
    """One move by the agent; nothing of vLLM's own carries weights in this era."""
    return Program(move=AgentMove(_AGENT_TRANSPORTS[transport]))


def plan_lifecycle(facts: EngineFacts, phase: Phase, release: Sequence[MemoryTag] = ()) -> Lifecycle:
    """The prefix cache is emptied after the last bucket; where there is none that costs nothing.

    Also for adapters: 0.27.1 keys it by name alone, and a trainer that began anew publishes a version again.

    Raises:
        PlanError: memory of `release` cannot be let go by this engine.
    """
    notes = [] if phase is Phase.ADAPTER else [FENCE_NOTE]  # its expression tells what is held back
    if facts.launch_arguments.get("dtype", "float32") != "float32":
        notes.append(
            f"The engine computes in {facts.launch_arguments['dtype']}; its log-probs differ from a float32 "
            "trainer's by rounding."
        )
    if facts.launch_arguments.get("drafter_told") and phase is not Phase.ADAPTER:
        notes.append(f"Speculative decoding: {facts.launch_arguments['drafter_told']}.")
    return Lifecycle(
        settle=(EngineCall(RESET_PREFIX_CACHE, timeout_seconds=_RESET_SECONDS),),
        notes=(*notes, *sleep_notes(facts, release)),
        memory=plan_memory(facts, release),
    )
