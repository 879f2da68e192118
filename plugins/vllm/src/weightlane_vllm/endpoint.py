"""The controller's handle: a front in another process, or an engine object in this one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.front.client import FrontEndpoint
from weightlane.front.desk import FrontDesk
from weightlane.front.endpoint import LocalEndpoint
from weightlane.front.gate import ServingGate
from weightlane_vllm.eras import reference_here
from weightlane_vllm.front_engine import LlmFrontEngine
from weightlane_vllm.general_plugin import FRONT_ADDRESS
from weightlane_vllm.opened_engine import is_async, require_engine

if TYPE_CHECKING:
    from weightlane.agent import WorkerAgent
    from weightlane.contexts import RolloutTarget
    from weightlane.endpoint import EngineEndpoint

_GATE = "_weightlane_gate"


def open_endpoint(target: RolloutTarget, timeout_seconds: float) -> EngineEndpoint:
    """The endpoint of a front's address, or of an `LLM` or `AsyncLLM` handle.

    Raises:
        EngineError: an HTTP address, behind which no agent of ours can be, or a handle that is no live engine
            with our worker extension.
    """
    if target.handle is not None:
        return LlmEndpoint(target.handle, timeout_seconds)
    if target.address.startswith(("http:", "https:")):
        raise EngineError(
            f"Backend vllm cannot reach {target.address}.",
            "Weights are received by an agent in the engine's workers, which no HTTP route of vLLM calls.",
            f"Start that server with {FRONT_ADDRESS}=unix:/PATH in its environment, or `python -m "
            "weightlane_vllm.server --address unix:/PATH`, and give that address.",
        )
    return FrontEndpoint(target.address, timeout_seconds)


class LlmEndpoint(LocalEndpoint):
    """An `EngineEndpoint` over an engine of this process, which stays its owner's.

    The owner of a `vllm.LLM` must not call it from another thread while a call of this endpoint runs, and
    what the owner generates with it is not held back while weights are half-written. An `AsyncLLM` may be
    called at any time; this endpoint's calls come from any thread but that of its event loop.
    """

    def __init__(self, llm: Any, timeout_seconds: float) -> None:
        require_engine(llm)
        kind = "AsyncLLM" if is_async(llm) else "LLM"
        address = f"vLLM {kind} in process {os.getpid()}"
        self._llm = llm
        self._engine = LlmFrontEngine(llm, backend=reference_here(), start_seconds=timeout_seconds)
        self._open = True
        desk = FrontDesk(self._engine, origin=address, gate=gate_of(llm))
        super().__init__(desk, address, timeout_seconds)

    def local_agent(self) -> WorkerAgent:
        """The agent of the only worker, where vLLM runs it in this process.

        Raises:
            EngineError: the engine's workers are processes of their own.
        """
        from weightlane.agents import agent_of

        engine = getattr(self._llm, "llm_engine", self._llm)
        core = getattr(engine.engine_core, "engine_core", None)
        wrapper = getattr(getattr(core, "model_executor", None), "driver_worker", None)
        if wrapper is None:
            raise EngineError(
                f"{self.address} has no worker in this process.",
                "vLLM was started with an engine core of its own.",
                "Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before an LLM is made, or use transport shm.",
            )
        return agent_of(wrapper.worker)

    def close(self) -> None:
        """Lets go of the engine. Idempotent."""
        if self._open:
            self._open = False
            self._engine.detach()


def gate_of(engine: Any) -> ServingGate:
    """The one gate of an engine object; it lives on the engine itself, since lanes come and go.

    What one lane has left half-written, no endpoint of another may generate from.
    """
    gate: ServingGate | None = vars(engine).get(_GATE)
    if gate is None:
        gate = ServingGate()
        setattr(engine, _GATE, gate)
    return gate
