"""Whatever becomes of one end, the other raises in time, says who is gone, and passes on the cause."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ring_peers import (
    beating,
    layouts_of,
    open_reader,
    reads_one_bucket,
    try_to_read,
    wires_of,
    write_sync,
    writes,
)

from weightlane.buckets import slot_sizes
from weightlane.errors import SyncError, SyncTimeoutError
from weightlane.ring import RingReader, RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SENT = {str(number): torch.full((64,), float(number)) for number in range(5)}
WIRES = wires_of(SENT)
LAYOUTS = layouts_of(WIRES)
LOST_AFTER = 1.0
SLACK = 2.0


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(label="test", slot_sizes=slot_sizes(LAYOUTS), peer="worker 0 of unix:/engine")
    yield ring
    ring.close()


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    ring = open_reader(str(writer.path), WIRES)
    yield ring
    ring.close()


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_reader_is_named_in_time(
    start_peer: Callable[..., Any], writer: RingWriter, death: signal.Signals
) -> None:
    with start_peer(reads_one_bucket, str(writer.path), WIRES, "sleeps") as peer:
        write_sync(writer, SENT, 1, buckets=2)
        peer.told()
        pid = peer.process.pid
        os.kill(pid, death)
        started = time.monotonic()
        with pytest.raises(SyncTimeoutError, match=rf"worker 0 of .* \(process {pid}\) has been silent"):
            writer.acquire(LAYOUTS[2], sync=1, seconds=30, lost_after=LOST_AFTER, check=nothing_to_check)
        assert time.monotonic() - started < LOST_AFTER + SLACK


@pytest.mark.requirement("R64")
def test_a_reader_that_lives_but_does_not_move_on_reaches_the_bound(
    start_peer: Callable[..., Any], writer: RingWriter
) -> None:
    with start_peer(reads_one_bucket, str(writer.path), WIRES, "sleeps") as peer:
        write_sync(writer, SENT, 1, buckets=2)
        peer.told()
        with pytest.raises(SyncTimeoutError, match=r"Waited 1\.5 s for the last bucket's release of sync 1"):
            writer.drain(sync=1, seconds=1.5, lost_after=LOST_AFTER, check=nothing_to_check)


@pytest.mark.requirement("R64")
def test_a_readers_cause_reaches_the_writer(start_peer: Callable[..., Any], writer: RingWriter) -> None:
    with start_peer(reads_one_bucket, str(writer.path), WIRES, "fails") as peer:
        write_sync(writer, SENT, 1, buckets=2)
        peer.told()
        started = time.monotonic()
        with pytest.raises(SyncError, match=r"refused or failed sync 1 .*lm_head\.weight has another shape"):
            writer.acquire(LAYOUTS[2], sync=1, seconds=30, lost_after=30, check=nothing_to_check)
        assert time.monotonic() - started < SLACK


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_writer_is_named_in_time(
    start_peer: Callable[..., Any], death: signal.Signals
) -> None:
    with start_peer(writes, SENT, "beats") as peer:
        path = peer.told()
        ring = open_reader(path, WIRES)
        try:
            ring.begin(1)
            peer.told()
            pid = peer.process.pid
            os.kill(pid, death)
            started = time.monotonic()
            error = try_to_read(ring, WIRES, seconds=30, lost_after=LOST_AFTER)
            assert time.monotonic() - started < LOST_AFTER + SLACK
            assert isinstance(error, SyncTimeoutError)
            assert f"The trainer rank (process {pid}) has been silent" in error.what
            assert "bucket 1 of sync 1" in error.what
        finally:
            ring.close()
            ring.path.unlink(missing_ok=True)  # whoever makes a ring meanwhile sweeps those of the dead


def test_a_writers_abort_reaches_the_reader(start_peer: Callable[..., Any]) -> None:
    with start_peer(writes, SENT, "aborts") as peer:
        ring = open_reader(peer.told(), WIRES)
        ring.begin(1)
        peer.told()
        peer.pipe.send("abort")
        error = try_to_read(ring, WIRES, seconds=30, lost_after=30)
        assert type(error) is SyncError
        assert error.why == "ControlLostError: rank 1 has been silent"
        ring.close()
        peer.pipe.send("end")
        peer.process.join(10)


# -- one process, both ends ---------------------------------------------------------------------------------


def test_a_check_that_raises_ends_the_wait(writer: RingWriter) -> None:
    def check() -> None:
        raise SyncError("another rank failed")

    writer.begin(1)
    with pytest.raises(SyncError, match="another rank failed"):
        writer.acquire(LAYOUTS[0], sync=1, seconds=30, lost_after=30, check=check)


def test_an_abort_before_the_writer_began_reaches_the_reader_that_waits(
    writer: RingWriter, reader: RingReader
) -> None:
    # A rank can fail between the start of the worker's call and its own first bucket.
    writer.begin(1)
    writer.abort("the engine refused", sync=2)
    reader.begin(2)
    with pytest.raises(SyncError, match="the engine refused"):
        reader.take(LAYOUTS[0], sync=2, seconds=30, lost_after=30)


def test_an_abort_of_an_earlier_sync_is_not_taken_for_this_one(
    writer: RingWriter, reader: RingReader
) -> None:
    writer.begin(1)
    writer.abort("sync 1 failed")
    reader.begin(2)
    with pytest.raises(SyncTimeoutError, match=r"Waited 0\.2 s for bucket 0 of sync 2"):
        reader.take(LAYOUTS[0], sync=2, seconds=0.2, lost_after=30)


def test_a_readers_failure_in_an_earlier_sync_is_not_taken_for_this_one(
    writer: RingWriter, reader: RingReader
) -> None:
    reader.begin(1)
    reader.fail("sync 1 failed")
    writer.begin(2)
    reader.begin(2)
    writer.acquire(LAYOUTS[0], sync=2, seconds=1, lost_after=30, check=nothing_to_check)


def test_a_readers_failure_is_seen_also_when_it_came_before_the_writer_began(
    writer: RingWriter, reader: RingReader
) -> None:
    reader.begin(1)
    reader.fail("no model")
    writer.begin(1)
    writer.acquire(LAYOUTS[0], sync=1, seconds=1, lost_after=30, check=nothing_to_check)
    writer.post(LAYOUTS[0], sync=1)
    with pytest.raises(SyncError, match="no model"):
        writer.drain(sync=1, seconds=30, lost_after=30, check=nothing_to_check)


def test_after_a_failed_sync_the_ring_is_good_for_the_next(writer: RingWriter, reader: RingReader) -> None:
    reader.begin(1)
    write_sync(writer, SENT, 1, buckets=2)
    writer.abort("a rank died")
    reader.fail("so be it")
    # Nothing was released: slots 0 and 1 still hold buckets of sync 1.
    reader.begin(2)
    with beating(writer, reader):
        write_sync(writer, SENT, 2, buckets=2)
        for layout in LAYOUTS[:2]:
            bucket, memory, _ = reader.take(layout, sync=2, seconds=1, lost_after=30)
            del bucket, memory
            reader.release(layout, sync=2)
        writer.drain(sync=2, seconds=1, lost_after=30, check=nothing_to_check)


def test_a_reader_still_in_an_earlier_sync_is_neither_overwritten_nor_left_waiting(
    writer: RingWriter, reader: RingReader
) -> None:
    reader.begin(1)
    write_sync(writer, SENT, 1, buckets=1)
    bucket, _, _ = reader.take(LAYOUTS[0], sync=1, seconds=1, lost_after=30)
    writer.begin(2)
    with pytest.raises(SyncTimeoutError, match="a free slot"):
        writer.acquire(LAYOUTS[0], sync=2, seconds=0.2, lost_after=30, check=nothing_to_check)
    assert bucket[:4].view(torch.float32).item() == 0.0
    reader.release(LAYOUTS[0], sync=1)
    with pytest.raises(SyncError, match="went on to sync 2"):
        reader.take(LAYOUTS[1], sync=1, seconds=30, lost_after=30)


def test_a_cause_of_any_length_and_any_text_fits(writer: RingWriter, reader: RingReader) -> None:
    reader.begin(1)
    writer.begin(1)
    writer.abort("ß" * 5000 + "\udcff")
    reader.fail("\udcff" + "ß" * 5000)
    with pytest.raises(SyncError) as caught:
        reader.take(LAYOUTS[0], sync=1, seconds=1, lost_after=30)
    assert caught.value.why.startswith("ßßß")
    writer.post(LAYOUTS[0], sync=1)
    with pytest.raises(SyncError, match=r"\?ßßß"):
        writer.drain(sync=1, seconds=1, lost_after=30, check=nothing_to_check)
