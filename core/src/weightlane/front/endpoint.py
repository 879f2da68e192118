"""An `EngineEndpoint` that speaks front messages, whatever carries them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from weightlane import failures, messages
from weightlane.errors import EngineError, ProtocolError
from weightlane.residency import WorkerResidency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.adapters import AdapterRef
    from weightlane.facts import EngineFacts
    from weightlane.front.desk import FrontDesk
    from weightlane.program import EngineCall, RequestMove
    from weightlane.receiver import WorkerDescription

_Reply = TypeVar("_Reply")

ANSWER_SECONDS = 10.0
"""How far a call may overrun the engine's own bound before we stop waiting for its answer."""


class MessageEndpoint(ABC):
    """The methods of `EngineEndpoint`, each as one front request.

    Args:
        address: where the engine is, for messages.
        timeout_seconds: bound of `facts`, `describe_workers` and `generate`; the other calls carry their own.
    """

    def __init__(self, address: str, timeout_seconds: float) -> None:
        self._address = address
        self._timeout = timeout_seconds

    @abstractmethod
    def _exchange(
        self, request: messages.FrontRequest, name: str, bound_seconds: float
    ) -> messages.FrontReply:
        """Carries one request to the front and gives its reply, within `bound_seconds`."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the handle, not of the engine. Idempotent."""

    @property
    def address(self) -> str:
        """Where the engine is."""
        return self._address

    def facts(self) -> EngineFacts:
        """Facts from the engine's own process."""
        return self._ask(messages.GetFacts(), messages.Facts, "facts", self._timeout).facts

    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        """Every worker's own description, in worker order."""
        answers = self._ask_workers(messages.Describe(backend), messages.Described, "describe", self._timeout)
        return tuple(answer.description for answer in answers)

    def residency(self, backend: str, lane: str, timeout_seconds: float) -> tuple[WorkerResidency, ...]:
        """What every worker holds now, in worker order."""
        request = messages.GetResidency(backend, lane)
        return tuple(self._ask_workers(request, WorkerResidency, "get-residency", timeout_seconds))

    def _ask_workers(
        self, request: messages.AgentRequest, expected: type[_Reply], name: str, seconds: float
    ) -> list[_Reply]:
        answers: list[_Reply] = []
        for worker, data in enumerate(self.call_workers(messages.encode(request), seconds)):
            sender = f"worker {worker} of {self.address}"
            reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender=sender)
            if isinstance(reply, failures.Failure):
                raise failures.error_of(reply)
            if not isinstance(reply, expected):
                raise _wrong_reply(sender, reply, name)
            answers.append(reply)
        return answers

    def call_workers(self, message: bytes, timeout_seconds: float) -> Sequence[bytes]:
        """One encoded reply per worker; a worker's own `Failure` is among the replies, not raised."""
        request = messages.CallWorkers(message, timeout_seconds)
        bound = timeout_seconds + ANSWER_SECONDS
        return self._ask(request, messages.WorkerReplies, "call_workers", bound).replies

    def call(self, call: EngineCall, *, version: int | None = None) -> str:
        """One call of the engine's own. A front takes a route and no fields."""
        if call.body != "{}" or (call.version_field and version is not None):
            raise EngineError(
                f"The call {call.route!r} to {self.address} has fields: {call.body} {call.version_field}.",
                "A front carries routes without fields.",
                "Have the plugin build this call without a body.",
            )
        request = messages.CallEngine(call.route, call.timeout_seconds)
        bound = call.timeout_seconds + ANSWER_SECONDS
        return self._ask(request, messages.EngineAnswer, f"call {call.route}", bound).text

    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        """Always refused: weights reach this engine through its agent."""
        del tensors, last, version
        raise EngineError(
            f"The endpoint {self.address} takes no bucket requests ({move.route}).",
            "This endpoint has an agent in the engine's worker, which receives by ring or by message.",
            "Have the plugin's program use AgentMove.",
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        adapter: AdapterRef | None = None,
    ) -> tuple[messages.Generation, ...]:
        """Continuations; `NotServableError` while a failed sync has left the weights half-written."""
        request = messages.Generate(
            tuple(tuple(prompt) for prompt in prompts),
            max_tokens,
            temperature,
            seed,
            adapter.name if adapter else "",
        )
        return self._ask(request, messages.Generations, "generate", self._timeout).generations

    def _ask(
        self, request: messages.FrontRequest, expected: type[_Reply], name: str, bound_seconds: float
    ) -> _Reply:
        reply = self._exchange(request, name, bound_seconds)
        if isinstance(reply, failures.Failure):
            raise failures.error_of(reply)
        if not isinstance(reply, expected):
            raise _wrong_reply(f"The front {self.address}", reply, name)
        return reply


class LocalEndpoint(MessageEndpoint):
    """An endpoint on an engine in this process: same messages, same gate, no socket.

    A call runs in the caller's thread; its bound is the engine's own.
    """

    def __init__(self, desk: FrontDesk, address: str, timeout_seconds: float) -> None:
        super().__init__(address, timeout_seconds)
        self._desk = desk

    def _exchange(
        self, request: messages.FrontRequest, name: str, bound_seconds: float
    ) -> messages.FrontReply:
        del name, bound_seconds
        return self._desk.answer(request)

    def close(self) -> None:
        """Nothing to let go of: the engine is its owner's."""


def _wrong_reply(sender: str, reply: object, call: str) -> ProtocolError:
    return ProtocolError(
        f"{sender} answered {call} with {type(reply).__name__}.",
        "Request and reply of different weightlane versions do not match.",
        "Install the same weightlane on both sides (weightlane doctor shows both versions).",
    )
