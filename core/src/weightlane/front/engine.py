"""What an engine must offer to be put behind a front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts
    from weightlane.messages import Generate, Generations


class FrontEngine(Protocol):
    """One engine, driven in this process.

    The front calls these methods from several threads at once: an engine that is not thread-safe guards
    itself, such that a long `call_workers` does not keep `facts` from answering. Whatever a method raises
    reaches the caller as a `Failure` with its traceback. The front itself keeps `generate` away while a
    sync writes, and refuses it while a worker says that it is not servable (see `weightlane.front.gate`).
    """

    def facts(self) -> EngineFacts:
        """The engine as it is; cheap, since it also serves as the sign of life."""

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """Carries one encoded `AgentRequest` to every worker.

        Returns:
            One encoded `AgentReply` per worker, in worker order.
        """

    def call(self, route: str, timeout_seconds: float) -> str:
        """One call of the engine's own (`reset_prefix_cache`, ...). An unknown route is an `EngineError`."""

    def generate(self, request: Generate) -> Generations:
        """Continuations in prompt order with natural-log log-probs of the chosen tokens."""

    def shutdown(self) -> None:
        """Ends the engine and its workers; called once, after the last answer."""
