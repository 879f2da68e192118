"""Which of vLLM's two engine classes an object is, told by its methods; nothing of vLLM is imported."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError

if TYPE_CHECKING:
    from weightlane_vllm.engine_calls import EngineCalls

WORKER_EXTENSION_CLASS = "weightlane_vllm.worker_extension.WeightlaneWorkerExtension"


def is_async(engine: Any) -> bool:
    """Whether this is an `AsyncLLM`: its calls are coroutines."""
    return inspect.iscoroutinefunction(getattr(engine, "collective_rpc", None))


def require_engine(engine: Any) -> None:
    """Raises EngineError for what is no `vllm.LLM` and no `AsyncLLM`, or has no worker extension of ours."""
    if is_async(engine) and hasattr(engine, "engine_core"):
        _require_extension(engine.vllm_config, "AsyncEngineArgs")
    elif hasattr(engine, "llm_engine") and hasattr(engine, "collective_rpc"):
        _require_extension(engine.llm_engine.vllm_config, "LLM")
    else:
        raise EngineError(
            f"rollout('vllm', engine=...) was given a {type(engine).__module__}.{type(engine).__qualname__}.",
            "vLLM's LLM and AsyncLLM classes are driven.",
            "Pass such an object, or the address of a front.",
        )


def calls_on(engine: Any) -> EngineCalls:
    """The calls on a `vllm.LLM` or an `AsyncLLM`.

    Raises:
        EngineError: it is neither, has no worker extension of ours, or no event loop yet.
    """
    require_engine(engine)
    if is_async(engine):
        from weightlane_vllm.async_llm_calls import AsyncLlmCalls

        return AsyncLlmCalls(engine)
    from weightlane_vllm.llm_calls import LlmCalls

    return LlmCalls(engine)


def _require_extension(config: Any, made_by: str) -> None:
    given = config.parallel_config.worker_extension_cls
    if given != WORKER_EXTENSION_CLASS:
        raise EngineError(
            "The vLLM engine has no weightlane agent in its workers.",
            f"Its worker_extension_cls is {given!r}.",
            f"Start it with {made_by}(..., worker_extension_cls={WORKER_EXTENSION_CLASS!r}).",
        )
