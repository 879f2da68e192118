"""The one agent of each engine worker of this process."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from weightlane.agent import WorkerAgent
from weightlane.contexts import AgentContext
from weightlane.errors import PluginError
from weightlane.registry import get_registry

if TYPE_CHECKING:
    from weightlane.engine_agent import WorkerEngine

_AGENT_ATTRIBUTE = "_weightlane_agent"


def agent_of(worker: Any) -> WorkerAgent:
    """The one agent of an engine's worker object; made on first use from this process's own registry.

    It lives on the worker itself: the agent refers to the worker, so that a table beside them would keep
    every engine of this process for ever.
    """
    agent: WorkerAgent | None = vars(worker).get(_AGENT_ATTRIBUTE)
    if agent is None:
        agent = WorkerAgent(lambda backend: _engine_from_registry(backend, worker), origin=_origin_of(worker))
        setattr(worker, _AGENT_ATTRIBUTE, agent)
    return agent


def _origin_of(worker: object) -> str:
    rank = getattr(worker, "rank", 0)
    return f"worker {rank} ({type(worker).__name__}, process {os.getpid()} on {socket.gethostname()})"


def _engine_from_registry(backend: str, worker: object) -> WorkerEngine:
    registry = get_registry()
    selected = registry.backend_named(backend)
    if selected is None:
        raise PluginError(
            f"Backend {backend} is not available in the engine's environment.",
            "The controller selected it from its own environment.",
            "Install the same plugin where the engine runs (weightlane doctor there tells what is missing).",
        )
    return registry.call_worker_agent(selected, AgentContext(selected.descriptor, worker))
