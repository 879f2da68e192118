"""The handle on a reference engine of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.agents import agent_of
from weightlane.front.endpoint import LocalEndpoint

if TYPE_CHECKING:
    from weightlane.agent import WorkerAgent
    from weightlane.reference.engine import ReferenceEngine

_SHOWN = 6  # digits of an incarnation; enough to tell engines of one folder apart


class ReferenceEndpoint(LocalEndpoint):
    """Messages through the engine's own desk and gate; tensors may go to its agent by reference."""

    def __init__(self, engine: ReferenceEngine, timeout_seconds: float) -> None:
        address = f"inprocess:{engine.model_path}#{engine.worker.current_incarnation()[:_SHOWN]}"
        super().__init__(engine.desk, address, timeout_seconds)
        self._engine = engine

    def local_agent(self) -> WorkerAgent:
        """The agent of the engine, which is its own worker."""
        return agent_of(self._engine)
