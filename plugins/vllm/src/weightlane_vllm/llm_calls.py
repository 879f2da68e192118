"""`EngineCalls` on a synchronous `LLM`: everything in one thread, so that nothing runs beside a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane_vllm.driver import LlmDriver
from weightlane_vllm.engine_calls import ADAPTERS_METHOD, Asked, Made, PauseMode
from weightlane_vllm.lora_request import lora_request
from weightlane_vllm.routes import require_reset
from weightlane_vllm.running_requests import running_requests_of
from weightlane_vllm.served_adapters import chosen_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class LlmCalls:
    """Made over a live `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._requests = running_requests_of(llm)
        self._driver = LlmDriver(llm, name=f"vLLM engine of {llm.llm_engine.model_config.model}")

    @property
    def config(self) -> Any:
        """The engine's `VllmConfig`."""
        return self._engine.vllm_config

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """None: between calls of `generate` an `LLM` has no request that runs."""
        return ()

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid` of the engine."""
        self._driver.watch(pid, what)

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process, once one has ended."""
        self._driver.require_alive()

    def collective_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """One call of a worker method on every worker."""

        def call(llm: Any) -> list[Any]:
            replies: list[Any] = llm.collective_rpc(method, args=arguments)
            return replies

        return self._driver.run(what, call, seconds)

    def publishing_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """In one job with the reset of the prefix cache: no generation can come between.

        What was generated since the last bucket came is in that cache: with `stage` and `commit` apart, or
        beside a sync that holds nothing back. A trainer that began anew publishes a version again, and under
        its name the cache would hold what the adapter of that name before had made.

        Raises:
            EngineError: beside what every call raises, the cache was not reset.
        """

        def call(llm: Any) -> list[Any]:
            replies: list[Any] = llm.collective_rpc(method, args=arguments)
            require_reset(bool(llm.reset_prefix_cache()))
            return replies

        return self._driver.run(what, call, seconds)

    def require_idle(self, seconds: float) -> None:
        """Between two jobs no call of ours generates, so that what is left was queued by the owner.

        An engine core of its own steps on by itself: a request would begin with one version and end, before
        anybody looks, with another (`LLM.enqueue`, `LLMEngine.add_request`).

        Raises:
            EngineError: beside what every call raises, requests have not ended.
        """
        left = self._driver.run("a look at requests", lambda _: self._requests.unended(), seconds)
        if left:
            raise EngineError(
                f"{left} request{'s are' if left > 1 else ' is'} queued in this vLLM LLM.",
                "It cannot hold them back, and they would be answered by two versions.",
                "Collect them before the sync (llm.wait_for_completion()), or use AsyncLLM.",
            )

    def admit_adapters(self, names: Collection[str], seconds: float) -> None:
        """Refused by the owner's own `generate` too: vLLM steps on over a request that it cannot load."""
        del seconds
        self._requests.admit_only(names)

    def generate(self, asked: Asked, seconds: float) -> list[Made]:
        """In one job with the question for adapters: no sync can come between."""

        def run(llm: Any) -> list[Made]:
            adapter = None
            if asked.adapter is not None:
                adapter = chosen_adapter(llm.collective_rpc(ADAPTERS_METHOD), asked.adapter)
            named = lora_request(adapter) if adapter else None
            outputs = llm.generate(asked.prompts, asked.parameters, use_tqdm=False, lora_request=named)
            return [Made(output, adapter, self._requests.published) for output in outputs]

        return self._driver.run("generate", run, seconds)

    def set_weight_version(self, version: str, seconds: float) -> None:
        """Labels what the engine samples from now on."""
        self._driver.run("set_weight_version", lambda _: self._engine.set_weight_version(version), seconds)

    def published(self, version: int, seconds: float) -> None:
        """Notes what is published."""
        del seconds
        self._requests.published = version

    def reset_prefix_cache(self, seconds: float) -> bool:
        """Empties the prefix cache."""
        return bool(self._driver.run("reset_prefix_cache", lambda llm: llm.reset_prefix_cache(), seconds))

    def reset_prefix_cache_of_running(self, seconds: float) -> bool:
        """Nothing runs beside a call, so that this is the plain one."""
        return self.reset_prefix_cache(seconds)

    def reset_encoder_cache(self, seconds: float) -> None:
        """Forgets what vision and audio encoders made of inputs."""
        self._driver.run("reset_encoder_cache", lambda _: self._engine.reset_encoder_cache(), seconds)

    def pause(self, mode: PauseMode, seconds: float) -> None:
        """Always refused."""
        del seconds
        raise EngineError(
            f"A vLLM LLM was to pause ({mode}).",
            "Only AsyncLLM can hold generation back.",
            "Connect again: the plan was made for another engine.",
        )

    def resume(self, seconds: float) -> None:
        """Nothing was paused."""

    def sleep(self, level: int, seconds: float) -> None:
        """vLLM's sleep."""
        self._driver.run("sleep", lambda llm: llm.sleep(level=level), seconds)

    def release_kv_cache_memory(self, seconds: float) -> None:
        """Lets the cache go alone."""
        self._driver.run("release_kv_cache_memory", lambda llm: llm.release_kv_cache_memory(), seconds)

    def wake_up(self, tags: Sequence[str], seconds: float) -> None:
        """Takes back memory by tag."""
        self._driver.run("wake_up", lambda llm: llm.wake_up(tags=list(tags)), seconds)

    def shutdown(self, seconds: float) -> None:
        """Ends the engine; processes of it that do not end by themselves are killed."""
        try:
            self._driver.run("shutdown", lambda _: self._engine.engine_core.shutdown(), seconds)
        except EngineError:
            pass  # dead, or busy: what is left of it is ended below
        finally:
            self._driver.close(end_processes=True)

    def detach(self) -> None:
        """Lets go of an engine that somebody else owns."""
        self._driver.close(end_processes=False)
