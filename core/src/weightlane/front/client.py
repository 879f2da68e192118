"""The controller's handle on an engine behind a front."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, TypeVar

from weightlane import messages
from weightlane.errors import EngineDeadError, EngineError, ProtocolError, SyncTimeoutError
from weightlane.front.address import key_for, parse_address
from weightlane.front.frames import MAX_FRAME_BYTES, connection_of, prove_key_to_server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from weightlane.facts import EngineFacts
    from weightlane.program import EngineCall, RequestMove
    from weightlane.receiver import WorkerDescription

_Reply = TypeVar("_Reply")

_STALL_SECONDS = 30.0
_POLL_SECONDS = 0.2  # how soon `close` ends a running call
_ANSWER_SECONDS = 10.0  # what the engine's own bound may be overrun by before we stop waiting for its answer


class FrontEndpoint:
    """An `EngineEndpoint` over a front.

    Each call has a connection of its own, so that a `call_workers` that lasts a whole sync keeps no other
    call waiting. All methods may be called from any thread.

    Args:
        address: `unix:/path` or `tcp:127.0.0.1:port`.
        timeout_seconds: bound of `facts`, `describe_workers` and `generate`; the other calls carry their own.
        authkey: shared key; for `tcp:` addresses `WEIGHTLANE_FRONT_KEY` is used when it is None.

    Raises:
        EngineError: the address is not one of a front, or `tcp:` without a key. Nothing is connected yet.
    """

    def __init__(self, address: str, timeout_seconds: float, *, authkey: bytes | None = None) -> None:
        self._where = parse_address(address)
        self._key = key_for(self._where, authkey)
        self._timeout = timeout_seconds
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        """The address as it was given."""
        return self._where.text

    def facts(self) -> EngineFacts:
        """Facts from the engine's own process."""
        return self._ask(messages.GetFacts(), messages.Facts, "facts", self._timeout).facts

    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        """Every worker's own description, in worker order."""
        replies = self.call_workers(messages.encode(messages.Describe(backend)), self._timeout)
        described: list[WorkerDescription] = []
        for worker, data in enumerate(replies):
            sender = f"worker {worker} of {self.address}"
            reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender=sender)
            if isinstance(reply, messages.Failure):
                raise messages.error_of(reply)
            if not isinstance(reply, messages.Described):
                raise _wrong_reply(sender, reply, "describe")
            described.append(reply.description)
        return tuple(described)

    def call_workers(self, message: bytes, timeout_seconds: float) -> Sequence[bytes]:
        """One encoded reply per worker; a worker's own `Failure` is among the replies, not raised."""
        request = messages.CallWorkers(message, timeout_seconds)
        bound = timeout_seconds + _ANSWER_SECONDS
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
        bound = call.timeout_seconds + _ANSWER_SECONDS
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
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[messages.Generation, ...]:
        """Continuations; `NotServableError` while a failed sync has left the weights half-written."""
        request = messages.Generate(tuple(tuple(prompt) for prompt in prompts), max_tokens, temperature, seed)
        return self._ask(request, messages.Generations, "generate", self._timeout).generations

    def shutdown(self) -> None:
        """Asks the front's process to end. Only for whoever started it."""
        self._ask(messages.Shutdown(), messages.EngineAnswer, "shutdown", self._timeout)

    def close(self) -> None:
        """Ends running calls with `EngineDeadError`; the engine is left alone. Idempotent."""
        self._closed.set()

    def _ask(
        self, request: messages.FrontRequest, expected: type[_Reply], name: str, bound_seconds: float
    ) -> _Reply:
        deadline = time.monotonic() + bound_seconds
        payload = messages.encode(request)
        if len(payload) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"A message of {len(payload)} bytes for {name} is too long for the front {self.address}.",
                f"A front reads {MAX_FRAME_BYTES} bytes at most.",
                "Send large tensors through the ring (transport shm).",
            )
        try:
            with self._connect(name, deadline) as connection:
                connection.send_bytes(payload)
                self._await(connection, name, deadline, bound_seconds)
                data = connection.recv_bytes(MAX_FRAME_BYTES)
        except AuthenticationError as error:
            raise EngineError(
                f"The front {self.address} and this process do not hold the same key.",
                f"{error}.",
                "Set WEIGHTLANE_FRONT_KEY to the same secret on both sides.",
            ) from error
        except (EOFError, OSError) as error:
            raise self._dead(name, f"{type(error).__name__}: {error}".rstrip(": ")) from error
        sender = f"front {self.address}"
        reply: messages.FrontReply = messages.decode(data, messages.FrontReply, sender=sender)
        if isinstance(reply, messages.Failure):
            raise messages.error_of(reply)
        if not isinstance(reply, expected):
            raise _wrong_reply(sender, reply, name)
        return reply

    def _connect(self, name: str, deadline: float) -> Connection:
        if self._closed.is_set():
            raise self._dead(name, "this endpoint was closed")
        sock = socket.socket(self._where.family, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            sock.connect(self._where.target)
            connection = connection_of(sock, stall_seconds=_STALL_SECONDS)
            undo.callback(connection.close)
            if self._key is not None:
                prove_key_to_server(connection, self._key)
            undo.pop_all()
        return connection

    def _await(self, connection: Connection, name: str, deadline: float, bound_seconds: float) -> None:
        """Returns when an answer begins to arrive, or the far side's end is to be read."""
        while not connection.poll(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._closed.is_set():
                raise self._dead(name, "this endpoint was closed during the call")
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(
                    f"{name} to {self.address} got no answer within {bound_seconds:g} s.",
                    "The engine's process lives but does not answer: it may still be busy, or hang.",
                    "Look at the engine's log; allow more time, or restart the engine.",
                )

    def _dead(self, name: str, why: str) -> EngineDeadError:
        return EngineDeadError(
            f"The engine at {self.address} is gone; the call was {name}.",
            f"{why}.",
            "Look at the end of the engine's log, restart it and connect again.",
        )


def _wrong_reply(sender: str, reply: object, call: str) -> ProtocolError:
    return ProtocolError(
        f"{sender} answered {call} with {type(reply).__name__}.",
        "Request and reply of different weightlane versions do not match.",
        "Install the same weightlane on both sides (weightlane doctor shows both versions).",
    )
