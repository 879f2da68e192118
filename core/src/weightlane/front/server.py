"""Serves one engine's front until it is told to shut down."""

from __future__ import annotations

import logging
import os
import socket
import threading
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane import messages
from weightlane.errors import EngineError, ProtocolError
from weightlane.failures import failure_of
from weightlane.front.address import FrontAddress, key_for, parse_address, prepare_socket_folder
from weightlane.front.desk import FrontDesk
from weightlane.front.frames import MAX_FRAME_BYTES, connection_of, prove_key_to_client, receive_frame
from weightlane.front.guests import Guests

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from weightlane.front.engine import FrontEngine

_log = logging.getLogger(__name__)

_STALL_SECONDS = 30.0
_MAX_CONNECTIONS = 128


def serve_front(engine: FrontEngine, address: str, *, authkey: bytes | None = None) -> None:
    """Serves `engine` on `address` until a `Shutdown` request; then calls `engine.shutdown()`.

    One thread per connection, so a caller that stalls, or a call that takes long, keeps nobody waiting.
    Blocks; call it from the main thread of the engine's process.

    Args:
        engine: what answers; see `FrontEngine` for its threads.
        address: `unix:/path` (its folder must be the caller's alone) or `tcp:127.0.0.1:port`.
        authkey: shared key. `tcp:` needs one, here or in `WEIGHTLANE_FRONT_KEY`.

    Raises:
        EngineError: the address cannot be used, or a `tcp:` address has no key.
    """
    try:
        where = parse_address(address)
        key = key_for(where, authkey)
        desk = FrontDesk(engine, origin=f"front {address} (process {os.getpid()})")
        with _listen(where) as listener:
            try:
                _Server(desk, where, key).run(listener)
            finally:
                if where.path:
                    Path(where.path).unlink(missing_ok=True)
    finally:
        engine.shutdown()


def _listen(where: FrontAddress) -> socket.socket:
    listener = socket.socket(where.family, socket.SOCK_STREAM)
    try:
        if where.path:
            prepare_socket_folder(where)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where.target)
        if where.path:
            Path(where.path).chmod(0o600)
        listener.listen(_MAX_CONNECTIONS)
        listener.settimeout(0.2)  # how soon a shutdown is noticed
    except OSError as error:
        listener.close()
        raise EngineError(f"A front cannot listen on {where.text}: {error}.") from error
    except BaseException:
        listener.close()
        raise
    return listener


class _Server:
    """The accept loop and its connection threads."""

    def __init__(self, desk: FrontDesk, where: FrontAddress, key: bytes | None) -> None:
        self._desk = desk
        self._where = where
        self._key = key
        self._stop = threading.Event()
        self._guests = Guests(_MAX_CONNECTIONS)

    def run(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = listener.accept()  # bounded by the listener's timeout, see `_listen`
            except TimeoutError:
                continue
            except OSError as error:
                _log.warning("front %s: accept failed: %s", self._where.text, error)
                self._stop.wait(0.2)  # out of descriptors; a tight loop would not free any
                continue
            if not self._guests.admit(sock.fileno()):
                _log.warning("front %s: more than %d calls at once", self._where.text, _MAX_CONNECTIONS)
                sock.close()
                continue
            try:
                # Daemon: a connection that is still in a long call must not keep the process alive.
                threading.Thread(target=self._serve_socket, args=(sock,), name="front", daemon=True).start()
            except RuntimeError as error:
                _log.warning("front %s: no thread for a connection: %s", self._where.text, error)
                self._guests.leave(sock.fileno())
                sock.close()

    def _serve_socket(self, sock: socket.socket) -> None:
        descriptor = sock.fileno()
        try:
            connection = connection_of(sock, stall_seconds=_STALL_SECONDS)
        except OSError as error:
            _log.debug("front %s: connection ended: %s", self._where.text, error)
            self._guests.leave(descriptor)
            sock.close()
            return
        with connection:
            try:
                if self._key is not None:
                    prove_key_to_client(connection, self._key)
                while not self._stop.is_set() and self._serve_request(connection):
                    pass
            except AuthenticationError:
                _log.warning("front %s: a client without the right key was refused", self._where.text)
            except (EOFError, OSError) as error:
                _log.debug("front %s: connection ended: %s", self._where.text, error)
            finally:
                self._guests.leave(descriptor)

    def _serve_request(self, connection: Connection) -> bool:
        """Reads one request and answers it; False when the connection is over."""
        if not connection.poll(_STALL_SECONDS):
            return False  # idle: callers open one connection per call
        try:
            data = receive_frame(connection, stall_seconds=_STALL_SECONDS)
        except EOFError:
            return False
        except OSError as error:
            # Too long, or it stopped in the middle; what follows cannot be told apart from the rest of it.
            refusal = ProtocolError(
                f"A frame for front {self._where.text} could not be read: {error}.",
                f"It is longer than {MAX_FRAME_BYTES} bytes, or stopped or crawled on its way for more than "
                f"{_STALL_SECONDS:g} s.",
                "Send large buckets through the ring (transport shm).",
            )
            connection.send_bytes(messages.encode(failure_of(refusal, origin=self._where.text)))
            return False
        try:
            request: messages.FrontRequest = messages.decode(data, messages.FrontRequest, sender="a client")
        except ProtocolError as error:
            connection.send_bytes(messages.encode(failure_of(error, origin=self._where.text)))
            return True
        with self._guests.answering(connection.fileno()):
            answer = self._answer(request)
        connection.send_bytes(answer)
        if isinstance(request, messages.Shutdown):
            self._stop.set()
            return False
        return True

    def _answer(self, request: messages.FrontRequest) -> bytes:
        try:
            return messages.encode(self._desk.answer(request))
        except Exception as error:  # noqa: BLE001 - an answer that cannot be encoded is a failure like any other
            return messages.encode(failure_of(error, origin=self._where.text))
