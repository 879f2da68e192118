"""What a front does with one request; no transport here, so that it also serves an engine in-process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import assert_never

from weightlane import failures, messages
from weightlane.front.gate import GateSync, ServingGate

if TYPE_CHECKING:
    from weightlane.front.engine import FrontEngine

_BY_VALUE = "load-inline"
_SYNC_STARTS = frozenset({"receive", "begin-inline", "receive-disk"})
_SYNC_GOES_ON = frozenset({_BY_VALUE, "finish-inline"})


class _Kind(msgspec.Struct, frozen=True):
    """The few fields of a message that matter to the gate; a payload is skipped, not copied."""

    type: str
    what: str = ""
    cause: str = ""
    backend: str = ""
    lane: str = ""
    sync: int = 0
    generation: str = "held"


class _ByValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=_BY_VALUE):
    """A `LoadInline` whose payload is looked at where it lies."""

    lane: str
    sync: messages.SyncNumber
    bucket: int
    payload: msgspec.Raw


class FrontDesk:
    """Answers front requests for one engine and works its gate.

    Args:
        engine: whose front this is.
        origin: how it names itself in errors.
        gate: the one of the engine, where it may have several desks in its life: each lane's end must not
            take along what is known of its weights. None makes one.
    """

    def __init__(self, engine: FrontEngine, *, origin: str, gate: ServingGate | None = None) -> None:
        self._engine = engine
        self._origin = origin
        self._gate = gate or ServingGate()
        self._backend = ""
        # The sync that is open on the workers, if generation goes on, or is held by the engine itself.
        self._beside: GateSync | None = None
        self._held_by_engine: GateSync | None = None

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
        # Read whole before the gate moves: what only looks like a sync's message must fence nothing.
        whole = _ByValue if kind.type == _BY_VALUE else messages.AgentRequest
        messages.decode(request.message, whole, sender="the controller")
        if kind.backend:
            self._backend = kind.backend
        sync = GateSync(kind.lane, kind.sync)
        starts = kind.type in _SYNC_STARTS
        writes = starts or kind.type in _SYNC_GOES_ON
        if starts and kind.generation == "held":
            self._gate.start_sync(sync, request.timeout_seconds)
        elif (starts and kind.generation == "engine-held") or (writes and sync == self._held_by_engine):
            self._gate.shut(sync)
        elif kind.type in _SYNC_GOES_ON and sync != self._beside:
            self._gate.go_on(sync, request.timeout_seconds)
        try:
            replies = self._engine.call_workers(request.message, request.timeout_seconds)
        except BaseException as error:
            if writes or kind.type == "publish":
                self._after_failure(sync, f"{kind.type} failed: {error}")
            raise
        failures = [reply.what for reply in map(_kind_of_reply, replies) if reply.type == "failure"]
        if failures and (writes or kind.type == "publish"):
            cause = f"{kind.type} failed on {len(failures)} worker(s): {failures[0]}"
            self._after_failure(sync, cause)
        elif kind.type == "cancel" and self._gate.shut_by(sync):
            self._after_failure(sync, f"the sync was cancelled: {kind.cause}")
        elif kind.type == "publish":
            self._gate.published(sync)
        elif starts:
            self._beside = sync if kind.generation == "goes-on" else None
            self._held_by_engine = sync if kind.generation == "engine-held" else None
            self._gate.accepted(sync)
        return replies

    def _after_failure(self, sync: GateSync, cause: str) -> None:
        """Ends a sync at the gate, which opens only when every worker says that it was not touched."""
        if self._gate.waits_for_another(sync):
            self._gate.withdrawn(sync)
        else:
            self._gate.failed(sync, self._why_not_whole(cause))

    def _why_not_whole(self, cause: str) -> str:
        """`cause` where a worker is not servable after it; "" where all are."""
        try:
            message = messages.encode(messages.Describe(self._backend))
            for data in self._engine.call_workers(message, 30.0):
                reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender="a worker")
                if not isinstance(reply, messages.Described) or not reply.description.servable:
                    return cause
        except Exception as error:  # noqa: BLE001 - a worker that cannot be asked counts as half-written
            return f"{cause}; the workers could not be asked whether they are whole: {error}"
        return ""


def _kind_of_reply(data: bytes) -> _Kind:
    return messages.decode(data, _Kind, sender="a worker")
