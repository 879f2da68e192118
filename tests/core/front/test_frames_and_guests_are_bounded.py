"""What a frame may take in memory and time, and who makes room when a front is full."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from weightlane.front.frames import MAX_FRAME_BYTES, connection_of, receive_frame
from weightlane.front.guests import Guests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs, connection_of(ours, stall_seconds=0.3) as connection:
        yield connection, theirs


def peak_mib(action: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        with pytest.raises((OSError, EOFError)):
            action()
        return tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()


def test_memory_follows_what_arrives(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(struct.pack("!i", MAX_FRAME_BYTES) + b"x" * 1000)
    assert peak_mib(lambda: receive_frame(connection, stall_seconds=0.3)) < 8


def test_the_librarys_own_reader_would_take_all_that_is_claimed(
    pair: tuple[Connection, socket.socket],
) -> None:
    # The control of the test above.
    connection, theirs = pair
    theirs.sendall(struct.pack("!i", MAX_FRAME_BYTES) + b"x" * 1000)
    assert peak_mib(lambda: connection.recv_bytes(MAX_FRAME_BYTES)) > 1000


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_whole_frames_arrive_as_they_were_sent(pair: tuple[Connection, socket.socket], nbytes: int) -> None:
    ours, theirs = pair
    data = bytes(range(256)) * (nbytes // 256 + 1)
    far = connection_of(theirs, stall_seconds=5.0)
    sender = threading.Thread(target=far.send_bytes, args=(data[:nbytes],))
    sender.start()
    assert receive_frame(ours, stall_seconds=5.0) == data[:nbytes]
    sender.join()
    far.close()


def test_one_that_trickles_is_given_up_though_it_never_stalls(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, theirs = pair
    theirs.sendall(struct.pack("!i", 1000))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            theirs.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(BlockingIOError, match=r"of 1000 bytes came in time"):
            receive_frame(connection, stall_seconds=0.3)
    finally:
        stop.set()
        sender.join()


@pytest.mark.parametrize(
    "header", [struct.pack("!i", -2), struct.pack("!i", -1) + struct.pack("!Q", 1 << 63)]
)
def test_lengths_that_cannot_be_are_refused(pair: tuple[Connection, socket.socket], header: bytes) -> None:
    connection, theirs = pair
    theirs.sendall(header)
    with pytest.raises(OSError, match="bad message length"):
        receive_frame(connection, stall_seconds=0.3)


def test_one_that_is_cut_short_has_ended(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(struct.pack("!i", 1000) + b"part")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="after 4 of 1000 bytes"):
        receive_frame(connection, stall_seconds=0.3)


# -- guests -------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(4)]
    for _, theirs in made:
        theirs.settimeout(5.0)
    yield made
    for ours, theirs in made:
        ours.close()
        theirs.close()


def is_dropped(theirs: socket.socket) -> bool:
    theirs.setblocking(False)
    try:
        return theirs.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_one_that_has_waited_longest_makes_room(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    guests = Guests(2)
    for ours, _ in pairs[:3]:
        assert guests.admit(ours.fileno())
    assert [is_dropped(theirs) for _, theirs in pairs[:3]] == [True, False, False]
    with pytest.raises(ConnectionAbortedError), guests.answering(pairs[0][0].fileno()):
        raise AssertionError("a dropped connection is not answered")


def test_who_is_being_answered_stays_and_is_the_last_to_go_afterwards(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    guests = Guests(2)
    first, second, third, fourth = (ours.fileno() for ours, _ in pairs)
    assert guests.admit(first)
    assert guests.admit(second)
    with guests.answering(first):
        assert guests.admit(third)
        assert is_dropped(pairs[1][1])
        with guests.answering(third):
            assert not guests.admit(fourth)
        assert guests.admit(fourth)
        assert is_dropped(pairs[2][1])
    assert not is_dropped(pairs[0][1])


def test_whoever_left_takes_no_room(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    guests = Guests(1)
    assert guests.admit(pairs[0][0].fileno())
    guests.leave(pairs[0][0].fileno())
    assert guests.admit(pairs[1][0].fileno())
    assert not is_dropped(pairs[0][1])
