from __future__ import annotations

import pickle
import socket
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from weightlane import messages

if TYPE_CHECKING:
    from weightlane.front.client import FrontEndpoint


class _TouchOnLoad:
    """Unpickling this creates a file, which is how the test would see that somebody unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def exchange(connection: Connection, payload: bytes) -> messages.Failure:
    connection.send_bytes(payload)
    assert connection.poll(5.0)
    reply: messages.FrontReply = messages.decode(connection.recv_bytes(), messages.FrontReply, sender="test")
    assert isinstance(reply, messages.Failure)
    return reply


def test_malformed_messages_are_refused_and_the_connection_lives_on(
    stranger: socket.socket, endpoint: FrontEndpoint, tmp_path: Path
) -> None:
    whole = messages.encode(messages.CallWorkers(b"x" * 100, 5.0))
    unknown_field = msgspec.msgpack.encode({"type": "get-facts", "colour": "red"})
    unknown_kind = msgspec.msgpack.encode({"type": "format-disk"})
    missing_field = msgspec.msgpack.encode({"type": "call-workers", "message": b""})
    touched = tmp_path / "unpickled"
    with Connection(stranger.detach()) as connection:
        for payload, named in [
            (b"\xc1 not msgpack", "could not be read"),
            (b"", "could not be read"),
            (whole[:-20], "truncated"),
            (unknown_field, "colour"),
            (unknown_kind, "format-disk"),
            (missing_field, "timeout_seconds"),
            (pickle.dumps(_TouchOnLoad(touched)), "could not be read"),
        ]:
            failure = exchange(connection, payload)
            assert failure.error_type == "ProtocolError"
            assert named in failure.what
            assert "Traceback" in failure.traceback
        connection.send_bytes(messages.encode(messages.GetFacts()))
        reply: messages.FrontReply = messages.decode(
            connection.recv_bytes(), messages.FrontReply, sender="test"
        )
        assert isinstance(reply, messages.Facts)
    assert not touched.exists()
    assert endpoint.facts().engine == "fake"


def test_a_message_that_is_no_agent_request_never_reaches_the_workers(endpoint: FrontEndpoint) -> None:
    from weightlane.errors import ProtocolError

    with pytest.raises(ProtocolError, match="from the controller could not be read"):
        endpoint.call_workers(b"\xc1", 5.0)


def test_a_frame_longer_than_allowed_is_refused_unread(
    stranger: socket.socket, endpoint: FrontEndpoint
) -> None:
    stranger.sendall(struct.pack("!i", -1) + struct.pack("!Q", 1 << 40))
    with Connection(stranger.detach()) as connection:
        assert connection.poll(5.0)
        reply: messages.FrontReply = messages.decode(
            connection.recv_bytes(), messages.FrontReply, sender="test"
        )
    assert isinstance(reply, messages.Failure)
    assert reply.error_type == "ProtocolError"
    assert "bad message length" in reply.what
    assert endpoint.facts().engine == "fake"


def test_a_frame_cut_short_ends_that_connection_only(
    stranger: socket.socket, endpoint: FrontEndpoint
) -> None:
    stranger.sendall(struct.pack("!i", 1000) + b"only the beginning")
    stranger.close()
    assert endpoint.facts().engine == "fake"


def test_a_stranger_who_stalls_in_mid_frame_keeps_nobody_waiting(
    stranger: socket.socket, endpoint: FrontEndpoint
) -> None:
    stranger.sendall(struct.pack("!i", 1000) + b"only the beginning")
    started = time.monotonic()
    for _ in range(5):
        endpoint.facts()
    assert time.monotonic() - started < 2.0


def test_a_stalled_frame_is_given_up_after_its_bound(tmp_path: Path) -> None:
    from weightlane.front.frames import connection_of

    ours, theirs = socket.socketpair()
    with theirs, connection_of(ours, stall_seconds=0.3) as connection:
        theirs.sendall(struct.pack("!i", 1000) + b"only the beginning")
        started = time.monotonic()
        with pytest.raises(OSError, match="temporarily unavailable"):
            connection.recv_bytes()
        assert 0.2 < time.monotonic() - started < 3.0
