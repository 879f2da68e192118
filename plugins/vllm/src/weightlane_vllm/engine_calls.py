"""What a front calls on a vLLM engine: one protocol, whichever class drives it.

`LlmCalls` drives an `LLM` from one thread, `AsyncLlmCalls` an `AsyncLLM` over its event loop. A call that a
front is to make in every era and on both is added here, in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from weightlane.adapters import AdapterRef

PauseMode: TypeAlias = Literal["wait", "abort", "keep"]
"""vLLM's words for what a pause does with requests that run: let them end, abort them, freeze them."""

AGENT_METHOD = "weightlane_agent"
ADAPTERS_METHOD = "weightlane_adapters"


@dataclass(frozen=True, slots=True)
class Asked:
    """What to generate: prompts as vLLM takes them, its `SamplingParams`, and the adapter by name.

    `adapter` is None where the engine runs without LoRA; "" names the base.
    """

    prompts: Sequence[Any]
    parameters: Any
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """One finished `RequestOutput` of vLLM, the adapter that made it, and what was published at its end."""

    output: Any
    adapter: AdapterRef | None = None
    version: int | None = None


class EngineCalls(Protocol):
    """One live engine. Thread-safe; every call ends within its seconds.

    Each call raises EngineDeadError as soon as a process of the engine has ended, and EngineError with vLLM's
    own text for whatever vLLM raises, or once the time is over.
    """

    @property
    def config(self) -> Any:
        """The engine's `VllmConfig`."""

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """How the engine itself can hold generation back; empty where it cannot."""

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid` of the engine."""

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process, once one has ended."""

    def collective_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """One call of a worker method on every worker; `what` names it in errors."""

    def publishing_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """The same for a message that publishes: nothing is generated before stale prefixes are gone."""

    def require_idle(self, seconds: float) -> None:
        """Raises EngineError where requests are left in an engine that nothing could pause for them."""

    def admit_adapters(self, names: Collection[str], seconds: float) -> None:
        """From now on a request that names an adapter of ours names one of these, or is refused."""

    def generate(self, asked: Asked, seconds: float) -> list[Made]:
        """Generates to the end, in the order of the prompts.

        Raises:
            EngineError: beside what every call raises, one was not made by one version.
        """

    def set_weight_version(self, version: str, seconds: float) -> None:
        """Labels what the engine samples from now on."""

    def published(self, version: int, seconds: float) -> None:
        """Notes what is published; generations from now on tell it."""

    def reset_prefix_cache(self, seconds: float) -> bool:
        """Empties the prefix cache; False where it did not: running requests use blocks."""

    def reset_prefix_cache_of_running(self, seconds: float) -> bool:
        """The same, running requests taken off first: they compute their keys and values anew, and go on."""

    def reset_encoder_cache(self, seconds: float) -> None:
        """Forgets what vision and audio encoders made of inputs."""

    def pause(self, mode: PauseMode, seconds: float) -> None:
        """Holds generation back until `resume`; new requests queue up. The caches stay as they are."""

    def resume(self, seconds: float) -> None:
        """Lets generation go on."""

    def sleep(self, level: int, seconds: float) -> None:
        """vLLM's sleep. Its scheduler is paused by it."""

    def release_kv_cache_memory(self, seconds: float) -> None:
        """Lets the cache go alone, while scheduling is held back (level 0); absent before 0.32."""

    def wake_up(self, tags: Sequence[str], seconds: float) -> None:
        """Takes back memory by tag. Once all of it is there vLLM lets generation go on, paused or not."""

    def shutdown(self, seconds: float) -> None:
        """Ends the engine; processes of it that do not end by themselves are killed."""

    def detach(self) -> None:
        """Lets go of an engine that somebody else owns."""
