"""What a front does with one request; no transport here, so that it also serves an engine in-process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import assert_never

from weightlane import failures, messages
from weightlane.front.gate import ServingGate

if TYPE_CHECKING:
    from weightlane.front.engine import FrontEngine

_BY_VALUE = "load-inline"
_SYNC_STARTS = frozenset({"receive", "begin-inline", "receive-disk"})
_SYNC_GOES_ON = frozenset({_BY_VALUE, "finish-inline"})


class _Kind(msgspec.Struct, frozen=True):
    """The few fields of an agent message that matter to the gate; a payload is skipped, not copied."""

    type: str
    what: str = ""
    cause: str = ""
    backend: str = ""
    sync: int = 0
    version: int = 0
    generation: str = "held"


class FrontDesk:
    """Answers front requests for one engine and keeps its gate."""

    def __init__(self, engine: FrontEngine, *, origin: str) -> None:
        self._engine = engine
        self._origin = origin
        self._gate = ServingGate()
        self._backend = ""

    def answer(self, request: messages.FrontRequest) -> messages.FrontReply:
        """The reply to one request; whatever goes wrong becomes a `Failure` with its traceback."""
        try:
            return self._answer(request)
        except Exception as error:  # noqa: BLE001 - the far side must hear of it, whatever it is
            return failures.failure_of(error, origin=self._origin)

    def _answer(self, request: messages.FrontRequest) -> messages.FrontReply:
        if isinstance(request, messages.GetFacts):
            return messages.Facts(self._engine.facts())
        if isinstance(request, messages.CallWorkers):
            return messages.WorkerReplies(tuple(self._call_workers(request)))
        if isinstance(request, messages.CallEngine):
            return messages.EngineAnswer(self._engine.call(request.route, request.timeout_seconds))
        if isinstance(request, messages.Generate):
            with self._gate.generation():
                return self._engine.generate(request)
        if isinstance(request, messages.Shutdown):
            return messages.EngineAnswer("shutting down")
        assert_never(request)

    def _call_workers(self, request: messages.CallWorkers) -> list[bytes]:
        kind: _Kind = messages.decode(request.message, _Kind, sender="the controller")
        if kind.type != _BY_VALUE:
            # Read whole before the gate moves: what only looks like a sync's message must fence nothing.
            messages.decode(request.message, messages.AgentRequest, sender="the controller")
        if kind.backend:
            self._backend = kind.backend
        what = f"sync {kind.sync} to version {kind.version}"
        if kind.type in _SYNC_STARTS and kind.generation == "held":
            self._gate.start_sync(what, request.timeout_seconds)
        writes = kind.type in _SYNC_STARTS or kind.type in _SYNC_GOES_ON or kind.type == "publish"
        try:
            replies = self._engine.call_workers(request.message, request.timeout_seconds)
        except BaseException as error:
            if writes:
                self._after_failure(f"{kind.type} failed: {error}")
            raise
        failures = [reply.what for reply in map(_kind_of_reply, replies) if reply.type == "failure"]
        if failures and writes:
            self._after_failure(f"{kind.type} failed on {len(failures)} worker(s): {failures[0]}")
        elif kind.type == "cancel" and self._gate.writing:
            self._after_failure(f"the sync was cancelled: {kind.cause}")
        elif kind.type == "publish":
            self._gate.open()
        return replies

    def _after_failure(self, cause: str) -> None:
        """Opens the gate only when every worker says that it was not touched."""
        try:
            message = messages.encode(messages.Describe(self._backend))
            for data in self._engine.call_workers(message, 30.0):
                reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender="a worker")
                if not isinstance(reply, messages.Described) or not reply.description.servable:
                    self._gate.shut(cause)
                    return
        except Exception as error:  # noqa: BLE001 - a worker that cannot be asked counts as half-written
            self._gate.shut(f"{cause}; the workers could not be asked whether they are whole: {error}")
            return
        self._gate.open()


def _kind_of_reply(data: bytes) -> _Kind:
    return messages.decode(data, _Kind, sender="a worker")
