"""Framed bytes over a socket, every read and write bounded.

`multiprocessing.connection.Connection` does the framing and the key challenge. Only its `*_bytes` methods
are used: `send` and `recv` would pickle.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

MAX_FRAME_BYTES = 1 << 30
"""Largest message either side reads. Buckets above it belong into a ring, not into a message."""


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


def prove_key_to_client(connection: Connection, key: bytes) -> None:
    """The server's half of the mutual challenge; raises `AuthenticationError`, `EOFError` or `OSError`."""
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


def prove_key_to_server(connection: Connection, key: bytes) -> None:
    """The client's half of the mutual challenge; raises `AuthenticationError`, `EOFError` or `OSError`."""
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
