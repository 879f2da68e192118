"""Framed bytes over a socket, every read and write bounded.

`multiprocessing.connection.Connection` does the framing of what is sent and the key challenge. Only its
`*_bytes` methods are used: `send` and `recv` would pickle.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FRAME_BYTES = 1 << 30
"""Largest message either side reads. Buckets above it belong into a ring, not into a message."""

_CHUNK_BYTES = 1 << 20
_SLOWEST_BYTES_A_SECOND = 1 << 20


def connection_of(sock: socket.socket, *, stall_seconds: float) -> Connection:
    """Takes over `sock`; afterwards a read or write that makes no progress for `stall_seconds` fails.

    The bound lies in the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`), since `Connection` itself knows none.
    """
    sock.settimeout(None)
    whole = int(stall_seconds)
    bound = struct.pack("ll", whole, int((stall_seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    return Connection(sock.detach())


def receive_frame(connection: Connection, *, stall_seconds: float, most: int = MAX_FRAME_BYTES) -> bytearray:
    """The next message, as `Connection.recv_bytes` would give it.

    Memory grows with what arrives, never with what a header claims. The whole of it may take `stall_seconds`,
    and a second more for each MiB claimed, however steadily single bytes trickle in.

    Raises:
        EOFError: the far side is gone, before the message or in the middle of it.
        OSError: it claims more than `most` bytes, or takes too long (a `BlockingIOError`).
    """
    deadline = time.monotonic() + stall_seconds
    (claimed,) = struct.unpack("!i", _read(connection, 4, deadline))
    if claimed == -1:
        (claimed,) = struct.unpack("!Q", _read(connection, 8, deadline))
    if not 0 <= claimed <= most:
        raise OSError(f"bad message length: {claimed}")
    return _read(connection, claimed, deadline + claimed / _SLOWEST_BYTES_A_SECOND)


def _read(connection: Connection, count: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < count:
        # Bounded by SO_RCVTIMEO, see `connection_of`.
        chunk = os.read(connection.fileno(), min(count - len(data), _CHUNK_BYTES))
        if not chunk:
            raise EOFError(f"the far side left after {len(data)} of {count} bytes")
        data += chunk
        if len(data) < count and time.monotonic() > deadline:
            raise BlockingIOError(errno.EAGAIN, f"{len(data)} of {count} bytes came in time")
    return data


def prove_key_to_client(connection: Connection, key: bytes) -> None:
    """The server's half of the mutual challenge; raises `AuthenticationError`, `EOFError` or `OSError`."""
    with _protocol_errors():
        deliver_challenge(connection, key)
        answer_challenge(connection, key)


def prove_key_to_server(connection: Connection, key: bytes) -> None:
    """The client's half of the mutual challenge; raises `AuthenticationError`, `EOFError` or `OSError`."""
    with _protocol_errors():
        answer_challenge(connection, key)
        deliver_challenge(connection, key)


@contextmanager
def _protocol_errors() -> Iterator[None]:
    # Up to Python 3.11 the library asserts what it expects of the far side.
    try:
        yield
    except (AssertionError, ValueError) as error:
        raise AuthenticationError(f"the far side does not speak the key challenge: {error}") from error
