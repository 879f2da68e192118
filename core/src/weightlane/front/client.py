"""The controller's handle on an engine behind a front."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING

from weightlane import messages
from weightlane.errors import EngineDeadError, EngineError, ProtocolError, SyncTimeoutError
from weightlane.front.address import key_for, parse_address, require_own_front
from weightlane.front.endpoint import MessageEndpoint
from weightlane.front.frames import MAX_FRAME_BYTES, connection_of, prove_key_to_server, receive_frame

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_STALL_SECONDS = 30.0
_POLL_SECONDS = 0.2  # how soon `close` ends a running call


class FrontEndpoint(MessageEndpoint):
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
        super().__init__(address, timeout_seconds)
        self._where = parse_address(address)
        self._key = key_for(self._where, authkey)
        self._closed = threading.Event()

    def shutdown(self) -> None:
        """Asks the front's process to end. Only for whoever started it."""
        self._ask(messages.Shutdown(), messages.EngineAnswer, "shutdown", self._timeout)

    def close(self) -> None:
        """Ends running calls with `EngineDeadError`; the engine is left alone. Idempotent."""
        self._closed.set()

    def _exchange(
        self, request: messages.FrontRequest, name: str, bound_seconds: float
    ) -> messages.FrontReply:
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
                data = receive_frame(connection, stall_seconds=_STALL_SECONDS)
        except AuthenticationError as error:
            raise EngineError(
                f"The front {self.address} and this process do not hold the same key.",
                f"{error}.",
                "Set WEIGHTLANE_FRONT_KEY to the same secret on both sides.",
            ) from error
        except BlockingIOError as error:  # SO_RCVTIMEO, SO_SNDTIMEO, or a message that crawled
            raise SyncTimeoutError(
                f"{name} to {self.address} stopped or crawled in the middle of a message for more than "
                f"{_STALL_SECONDS:g} s.",
                "The engine's process lives but neither reads nor writes.",
                "Look at the engine's log; restart the engine.",
            ) from error
        except (EOFError, OSError) as error:
            raise self._dead(name, f"{type(error).__name__}: {error}".rstrip(": ")) from error
        reply: messages.FrontReply = messages.decode(
            data, messages.FrontReply, sender=f"the front {self.address}"
        )
        return reply

    def _connect(self, name: str, deadline: float) -> Connection:
        if self._closed.is_set():
            raise self._dead(name, "this endpoint was closed")
        sock = socket.socket(self._where.family, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            sock.connect(self._where.target)
            require_own_front(sock, self._where)
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
            "Look at the end of the engine's log and restart it; the next sync of a lane brings it level.",
        )
