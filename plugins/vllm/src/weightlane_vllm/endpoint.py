"""The controller's handle: a front in another process, or an `LLM` object in this one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.front.client import FrontEndpoint
from weightlane.front.desk import FrontDesk
from weightlane.front.endpoint import LocalEndpoint
from weightlane_vllm.eras import reference_here
from weightlane_vllm.front_engine import LlmFrontEngine

if TYPE_CHECKING:
    from weightlane.agent import WorkerAgent
    from weightlane.contexts import RolloutTarget
    from weightlane.endpoint import EngineEndpoint


def open_endpoint(target: RolloutTarget, timeout_seconds: float) -> EngineEndpoint:
    """The endpoint of a front's address or of an `LLM` handle.

    Raises:
        EngineError: an HTTP address, behind which no agent of ours can be, or a handle that is no live `LLM`
            with our worker extension.
    """
    if target.handle is not None:
        return LlmEndpoint(target.handle, timeout_seconds)
    if target.address.startswith(("http:", "https:")):
        raise EngineError(
            f"Backend vllm cannot reach {target.address}.",
            "In this era weights are received by an agent in the engine's workers, which a vLLM HTTP server "
            "gives no way to call.",
            "Start the engine with `python -m weightlane_vllm.server --address unix:/PATH`, and give that "
            "address.",
        )
    return FrontEndpoint(target.address, timeout_seconds)


class LlmEndpoint(LocalEndpoint):
    """An `EngineEndpoint` over a `vllm.LLM` of this process; the engine stays its owner's.

    The owner must not call the `LLM` from another thread while a call of this endpoint runs. What the owner
    generates with the `LLM` itself is not held back while weights are half-written.
    """

    def __init__(self, llm: Any, timeout_seconds: float) -> None:
        if not hasattr(llm, "llm_engine") or not hasattr(llm, "collective_rpc"):
            raise EngineError(
                f"rollout('vllm', engine=...) was given a {type(llm).__module__}.{type(llm).__qualname__}.",
                "This era drives vLLM's synchronous LLM class.",
                "Pass the vllm.LLM object, or the address of a front.",
            )
        address = f"vLLM LLM in process {os.getpid()}"
        self._llm = llm
        self._engine = LlmFrontEngine(llm, backend=reference_here(), start_seconds=timeout_seconds)
        self._open = True
        super().__init__(FrontDesk(self._engine, origin=address), address, timeout_seconds)

    def local_agent(self) -> WorkerAgent:
        """The agent of the only worker, where vLLM runs it in this process.

        Raises:
            EngineError: the engine's workers are processes of their own.
        """
        from weightlane.agents import agent_of

        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        wrapper = getattr(getattr(core, "model_executor", None), "driver_worker", None)
        if wrapper is None:
            raise EngineError(
                f"{self.address} has no worker in this process.",
                "vLLM was started with an engine core of its own.",
                "Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the LLM is made, or use transport shm.",
            )
        return agent_of(wrapper.worker)

    def close(self) -> None:
        """Lets go of the engine. Idempotent."""
        if self._open:
            self._open = False
            self._engine.detach()
