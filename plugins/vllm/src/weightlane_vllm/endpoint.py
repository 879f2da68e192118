"""The controller's handle: a front in another process, or an `LLM` object in this one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from weightlane import messages
from weightlane.errors import EngineError, ProtocolError
from weightlane.front.client import FrontEndpoint
from weightlane.front.desk import FrontDesk
from weightlane_vllm.facts import ENGINE
from weightlane_vllm.front_engine import LlmFrontEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch import Tensor
    from typing_extensions import Self

    from weightlane.contexts import RolloutTarget
    from weightlane.endpoint import EngineEndpoint
    from weightlane.facts import EngineFacts
    from weightlane.program import EngineCall, RequestMove
    from weightlane.receiver import WorkerDescription

_Reply = TypeVar("_Reply")


def open_endpoint(target: RolloutTarget, timeout_seconds: float) -> EngineEndpoint:
    """The endpoint of a front's address or of an `LLM` handle.

    Raises:
        EngineError: an HTTP address, behind which no agent of ours can be, or a handle that is no live `LLM`
            with our worker extension.
    """
    if target.handle is not None:
        return LlmEndpoint(target.handle, timeout_seconds=timeout_seconds)
    if target.address.startswith(("http:", "https:")):
        raise EngineError(
            f"Backend vllm cannot reach {target.address}.",
            "In this era weights are received by an agent in the engine's workers, which a vLLM HTTP server "
            "gives no way to call.",
            "Start the engine with `python -m weightlane_vllm.server --address unix:/PATH`, and give that "
            "address.",
        )
    return FrontEndpoint(target.address, timeout_seconds)


class LlmEndpoint:
    """An `EngineEndpoint` over an `LLM` of this process; the engine stays its owner's.

    The owner must not call the `LLM` from another thread while a call of this endpoint runs. What the owner
    generates with the `LLM` itself is not held back while weights are half-written.
    """

    def __init__(self, llm: Any, *, timeout_seconds: float) -> None:
        if not hasattr(llm, "llm_engine") or not hasattr(llm, "collective_rpc"):
            raise EngineError(
                f"rollout('vllm', engine=...) was given a {type(llm).__module__}.{type(llm).__qualname__}.",
                "This era drives vLLM's synchronous LLM class.",
                "Pass the vllm.LLM object, or the address of a front.",
            )
        self._timeout = timeout_seconds
        self._engine = LlmFrontEngine(llm, backend=ENGINE, start_seconds=timeout_seconds)
        self._desk = FrontDesk(self._engine, origin=self.address)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """How messages call this engine."""
        return f"vLLM LLM in process {os.getpid()}"

    def facts(self) -> EngineFacts:
        """Facts as the workers told them."""
        return self._ask(messages.GetFacts(), messages.Facts).facts

    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        """Every worker's own description, in rank order."""
        described: list[WorkerDescription] = []
        for data in self.call_workers(messages.encode(messages.Describe(backend)), self._timeout):
            reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender="a vLLM worker")
            if isinstance(reply, messages.Failure):
                raise messages.error_of(reply)
            if not isinstance(reply, messages.Described):
                raise ProtocolError(f"A vLLM worker answered describe with {type(reply).__name__}.")
            described.append(reply.description)
        return tuple(described)

    def call_workers(self, message: bytes, timeout_seconds: float) -> Sequence[bytes]:
        """One encoded reply per worker; a worker's own `Failure` is among the replies, not raised."""
        return self._ask(messages.CallWorkers(message, timeout_seconds), messages.WorkerReplies).replies

    def call(self, call: EngineCall, *, version: int | None = None) -> str:
        """One call of the engine's own; this backend's calls have no fields."""
        if call.body != "{}" or (call.version_field and version is not None):
            raise EngineError(f"The call {call.route!r} has fields, which backend vllm does not send.")
        return self._ask(messages.CallEngine(call.route, call.timeout_seconds), messages.EngineAnswer).text

    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        """Always refused: weights reach this engine through its agent."""
        del tensors, last, version
        raise EngineError(f"Backend vllm takes no bucket requests ({move.route}).")

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[messages.Generation, ...]:
        """Continuations; `NotServableError` while a failed sync has left the weights half-written."""
        request = messages.Generate(tuple(tuple(prompt) for prompt in prompts), max_tokens, temperature, seed)
        return self._ask(request, messages.Generations).generations

    def close(self) -> None:
        """Lets go of the engine. Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine.detach()

    def _ask(self, request: messages.FrontRequest, expected: type[_Reply]) -> _Reply:
        reply = self._desk.answer(request)
        if isinstance(reply, messages.Failure):
            raise messages.error_of(reply)
        if not isinstance(reply, expected):
            raise ProtocolError(f"The engine answered {type(request).__name__} with {type(reply).__name__}.")
        return reply
