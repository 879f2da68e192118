"""Real processes on one channel: messages, failures and aborts reach everyone; the dead are named in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from control_peers import (
    LOST_AFTER,
    beats_only,
    free_address,
    gives_its_part,
    is_the_controller,
    open_channel,
    waits_for_the_controller,
)

from weightlane.errors import (
    ControlLostError,
    ExportError,
    PlanError,
    ProtocolError,
    SyncError,
    SyncTimeoutError,
)
from weightlane.failures import failure_of
from weightlane.messages import Described, Done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.control import ControlChannel

SLACK = 2.0


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    """Closed after the controller's own channel, which ends without waiting for killed ranks."""
    with ExitStack() as stack:
        yield stack


def told_by(peer: Any) -> Any:
    found = peer.told()
    peer.pipe.send("close")
    return found


def test_three_ranks_gather_and_answer(start_peer: Callable[..., Any], peers: ExitStack) -> None:
    address = free_address()
    channel = open_channel(address, 0, 3)
    others = [peers.enter_context(start_peer(gives_its_part, address, rank, 3, "gives")) for rank in (1, 2)]
    channel.put("part/0", Done(0))
    assert [part.worker for part in channel.gather("part", Done, seconds=20)] == [0, 10, 20]
    channel.put("answer", Done(7))
    assert [told_by(other) for other in others] == [("Done", "Done(worker=7)")] * 2
    channel.close(seconds=10)
    for other in others:
        other.process.join(10)
        assert other.process.exitcode == 0


def test_a_failure_of_one_rank_is_the_same_typed_error_on_all(
    start_peer: Callable[..., Any], peers: ExitStack
) -> None:
    address = free_address()
    channel = open_channel(address, 0, 3)
    others = [
        peers.enter_context(start_peer(gives_its_part, address, rank, 3, kind))
        for rank, kind in ((1, "gives"), (2, "fails"))
    ]
    channel.put("part/0", Done(0))
    with pytest.raises(ExportError, match=r"w has no data.*from rank 2.*meta device") as caught:
        channel.gather("part", Done, seconds=20)
    channel.put("answer", failure_of(caught.value, origin="the controller"))
    for kind, text in map(told_by, others):
        assert kind == "ExportError"
        assert "w has no data. (from rank 2)" in text
    channel.close(seconds=10)


def test_the_first_abort_wins_on_every_rank(start_peer: Callable[..., Any], peers: ExitStack) -> None:
    address = free_address()
    channel = open_channel(address, 0, 3)
    first = peers.enter_context(start_peer(gives_its_part, address, 1, 3, "aborts"))
    assert told_by(first)[0] == "ExportError"
    second = peers.enter_context(start_peer(gives_its_part, address, 2, 3, "aborts"))
    channel.abort("sync-1", SyncError("a later cause"))
    assert "rank 1 cannot" in told_by(second)[1]
    with pytest.raises(ExportError, match="rank 1 cannot"):
        channel.check_abort("sync-1")
    with pytest.raises(ExportError, match="rank 1 cannot"):
        channel.get("never", Done, seconds=20, awaited=(), abort="sync-1")
    channel.check_abort("sync-2")
    channel.close(seconds=10)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_is_named_in_time(
    start_peer: Callable[..., Any], peers: ExitStack, death: signal.Signals
) -> None:
    address = free_address()
    channel = open_channel(address, 0, 2)
    peer = peers.enter_context(start_peer(beats_only, address, 1, 2))
    place = peer.told()
    channel.know_places([place])
    # The control: while it lives, the wait reaches its own bound instead.
    with pytest.raises(SyncTimeoutError, match="from rank 1 on the control channel"):
        channel.get("part/1", Done, seconds=LOST_AFTER + 0.5, awaited=(1,))
    os.kill(place.process_id, death)
    started = time.monotonic()
    with pytest.raises(ControlLostError, match=rf"Rank 1 \(process {place.process_id} on here\)"):
        channel.get("part/1", Done, seconds=30, awaited=(0, 1))
    assert time.monotonic() - started < LOST_AFTER + SLACK
    channel.close(seconds=0.1)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_controller_ends_every_wait_in_time(
    start_peer: Callable[..., Any], peers: ExitStack, death: signal.Signals
) -> None:
    address = free_address()
    controller = peers.enter_context(start_peer(is_the_controller, address, 3))
    controller.told()
    others = [peers.enter_context(start_peer(waits_for_the_controller, address, rank, 3)) for rank in (1, 2)]
    for other in others:
        other.told()
    for other in others:
        other.pipe.send("now")
    os.kill(controller.process.pid, death)
    for other in others:
        kind, text, seconds = other.told()
        assert kind == "ControlLostError"
        assert "rank 0" in text.lower()
        assert seconds < LOST_AFTER + SLACK


# -- one process ----------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[ControlChannel]:
    channel = open_channel(None, 0, 1)
    yield channel
    channel.close()


def test_the_server_listens_on_loopback_only(alone: ControlChannel) -> None:
    port = alone._store.port
    listening: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, hexport = local.split(":")
            if state == "0A" and int(hexport, 16) == port:
                listening.append(address)
    assert listening == ["0100007F"]  # 127.0.0.1, and nothing else


def test_typed_messages_only(alone: ControlChannel) -> None:
    alone.put("x", Done(1))
    with pytest.raises(ProtocolError, match="control channel key x"):
        alone.get("x", Described, seconds=1, awaited=())
    assert alone.get("x", Done, seconds=1, awaited=()) == Done(1)


def test_a_plan_error_arrives_with_its_problems(alone: ControlChannel) -> None:
    from weightlane.errors import Problem

    sent = PlanError([Problem("shape", "w", "is another")], lane="lane-1")
    alone.put("plan", failure_of(sent, origin="the controller"))
    with pytest.raises(PlanError) as caught:
        alone.get("plan", Done, seconds=1, awaited=())
    assert caught.value.problems == sent.problems


def test_a_forgotten_key_is_gone(alone: ControlChannel) -> None:
    alone.put("x", Done(1))
    alone.forget("x", "never there")
    with pytest.raises(SyncTimeoutError, match=r"Waited 0\.1 s for 'x'"):
        alone.get("x", Done, seconds=0.1, awaited=())


def test_after_off_beat_a_callback_is_not_called_again(alone: ControlChannel) -> None:
    class FakeRing:
        closed = False
        beats = threading.Semaphore(0)
        late = 0

        def beat(self) -> None:
            self.late += self.closed
            self.beats.release()

    ring, other = FakeRing(), threading.Semaphore(0)
    alone.on_beat(ring.beat)
    assert ring.beats.acquire(timeout=5)
    alone.off_beat(ring.beat)
    ring.closed = True
    alone.on_beat(lambda: other.release() or None)
    for _ in range(2):
        assert other.acquire(timeout=5)
    assert ring.late == 0


def test_close_is_idempotent_and_bounded_when_others_never_close() -> None:
    channel = open_channel(free_address(), 0, 2)
    started = time.monotonic()
    channel.close(seconds=0.3)
    channel.close()
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "http://127.0.0.1:80", "tcp://:80", "tcp://h", "tcp://h:99999"]
)
def test_an_address_of_another_form_is_a_typed_error(address: str) -> None:
    with pytest.raises(ControlLostError, match="Rank 1 could not open the control channel"):
        open_channel(address, 1, 2)


def test_without_any_address_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "WEIGHTLANE_CONTROL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ControlLostError, match="MASTER_ADDR and MASTER_PORT are not set"):
        open_channel(None, 1, 2)


def test_a_port_in_use_is_a_typed_error(alone: ControlChannel) -> None:
    with pytest.raises(ControlLostError, match="in use"):
        open_channel(f"tcp://127.0.0.1:{alone._store.port}", 0, 2)
