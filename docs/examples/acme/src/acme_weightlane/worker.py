"""The engine's side: how it is called, what it tells of itself, and how it is written to."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from weightlane.agents import agent_of
from weightlane.errors import EngineError
from weightlane.facts import EngineFacts
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from acme_weightlane.engine import AcmeEngine
    from weightlane.errors import Problem
    from weightlane.messages import Generate, Generations, ReceivePlan


def facts_of(engine: AcmeEngine) -> EngineFacts:
    """The live engine as it is."""
    seen = {"acme:Engine.weights": isinstance(getattr(engine, "weights", None), dict)}
    return EngineFacts("acme", engine.release, "worker", attributes=seen)


class AcmeFront:
    """A `FrontEngine`: what the controller may ask of the engine."""

    def __init__(self, engine: AcmeEngine) -> None:
        self._engine = engine

    def facts(self) -> EngineFacts:
        """The engine as it is."""
        return facts_of(self._engine)

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """One worker, this process; core's agent answers for it."""
        del timeout_seconds  # the agent bounds its own waits
        return [agent_of(self._engine).handle(message)]

    def call(self, route: str, timeout_seconds: float) -> str:
        """Refuses: acme has no calls."""
        del timeout_seconds
        raise EngineError(f"acme has no call {route!r}.", "It has none at all.", "Leave it out of the plan.")

    def generate(self, request: Generate) -> Generations:
        """Refuses: this stand-in only holds weights."""
        asked = f"{len(request.prompts)} prompts"
        raise EngineError(f"acme does not answer {asked}.", "It only holds weights.", "Read those instead.")

    def shutdown(self) -> None:
        """Nothing outlives the process."""


class AcmeWorker:
    """A `WorkerEngine`: describes the weights and writes them."""

    def __init__(self, engine: AcmeEngine) -> None:
        self._engine = engine
        self._incarnation = f"{os.getpid()}-{id(engine)}"
        self._written: set[str] = set()

    def describe(self) -> WorkerDescription:
        """The live tensors, looked up afresh, and the checkpoint that they expect."""
        weights = self._engine.weights
        live = [LiveTensor(name, tuple(t.shape), _dtype(t)) for name, t in weights.items()]
        return WorkerDescription(
            worker=0,
            workers=1,
            host=socket.gethostname(),
            process_id=os.getpid(),
            incarnation=self._incarnation,
            live=tuple(live),
            expected=tuple(ExpectedTensor(item.name, item.shape, item.dtype) for item in live),
        )

    def current_incarnation(self) -> str:
        """The same engine object, the same incarnation; asked before each sync."""
        return self._incarnation

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        """Nothing beyond what core compares with `expected`."""
        del plan
        return ()

    def begin(self, version: int) -> None:
        """The first write follows."""
        del version
        self._written.clear()

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Copies: what is given is valid during this call alone."""
        for name, tensor in tensors:
            self._engine.weights[name].copy_(tensor)
            self._written.add(name)
        return len(tensors)

    def finish(self, version: int) -> None:
        """Every tensor must have come; a missing one is never served in silence."""
        missing = self._engine.weights.keys() - self._written
        if missing:
            raise EngineError(f"Version {version} lacks {sorted(missing)}.", "A full sync writes everything.")

    def publish(self, version: int) -> None:
        """Every worker of every replica has verified: serve it."""
        self._engine.serves = version


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
