"""A sender that skips, repeats, invents or overwrites is told from one that does its part."""

from __future__ import annotations

import contextlib
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from fake_engine import WEIGHTS, WIRES, FakeWorkerEngine, ask, attached, begin, load, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_peers import words_of
from ring_victims import LAYOUTS, SIZES

from weightlane.errors import ProtocolError, SyncError, WeightlaneError
from weightlane.messages import Attach, Cancel, FinishInline, Publish, Receive
from weightlane.packing import WireDigest, pack_bucket
from weightlane.ring import RingReader, RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUES = list(WEIGHTS.values())
BOUNDS = {"seconds": 30.0, "lost_after": 30.0}
SHORT = {"seconds": 0.02, "lost_after": 30.0}
RECEIVE = Receive("lane-1", "p1", 1, 10, {0: "first"}, 0.2, 30.0)


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    yield ring
    ring.close()


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    ring = RingReader(str(writer.path), SIZES)
    yield ring
    ring.close()


def put(writer: RingWriter, bucket: int, *, sync: int = 1) -> None:
    """Packs and posts without waiting for anybody, as a sender that is broken may."""
    layout = LAYOUTS[bucket]
    slot = writer.slot_tensor(layout)
    pack_bucket(slot, layout, WIRES, [(entry.tensor, VALUES[entry.tensor]) for entry in layout.entries])
    writer.post(layout, sync=sync)


def slot_word(bucket: int, *, released: bool) -> int:
    return 16 + 2 * LAYOUTS[bucket].slot + released


# -- over a ring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [(1 << 24) + 3, (1 << 24) + 99, 9 << 24, (1 << 63) - 1, -1, -(1 << 63)])
def test_another_bucket_where_one_was_due_is_told_at_once(
    writer: RingWriter, reader: RingReader, word: int
) -> None:
    writer.begin(1)
    reader.begin(1)
    words_of(writer)[slot_word(0, released=False)] = word
    with pytest.raises(ProtocolError, match=r"The ring holds bucket .* where bucket 0 of sync 1 was due"):
        reader.take(LAYOUTS[0], sync=1, **BOUNDS)


def test_a_bucket_of_an_earlier_sync_is_not_taken_for_this_ones(
    writer: RingWriter, reader: RingReader
) -> None:
    writer.begin(1)
    put(writer, 0, sync=1)
    writer.begin(2)
    reader.begin(2)
    with pytest.raises(SyncError, match="bucket 0 of sync 2"):
        reader.take(LAYOUTS[0], sync=2, **SHORT)


@pytest.mark.parametrize("word", [(1 << 24) + 2, 9 << 24, -1])
def test_a_release_of_what_was_never_posted_is_told_at_once(
    writer: RingWriter, reader: RingReader, word: int
) -> None:
    writer.begin(1)
    reader.begin(1)
    put(writer, 0)
    words_of(reader)[slot_word(0, released=True)] = word
    with pytest.raises(ProtocolError, match="worker 0 released bucket"):
        writer.drain(sync=1, check=nothing_to_check, **BOUNDS)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_whatever_stands_in_the_header_nobody_crashes_or_waits_on(seed: int) -> None:
    random = Random(seed)
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    reader = RingReader(str(writer.path), SIZES)
    try:
        writer.begin(1)
        reader.begin(1)
        put(writer, 0)
        for _ in range(random.randint(1, 6)):
            value = random.choice([0, 1, 2, -1, (1 << 63) - 1, -(1 << 63), random.getrandbits(63)])
            words_of(writer)[random.randrange(512)] = value
        actions = [
            lambda: reader.take(LAYOUTS[0], sync=1, **SHORT),
            lambda: reader.release(LAYOUTS[0], sync=1),
            lambda: writer.acquire(LAYOUTS[1], sync=1, check=nothing_to_check, **SHORT),
            lambda: writer.drain(sync=1, check=nothing_to_check, **SHORT),
            lambda: writer.abort("a cause"),
            lambda: reader.fail("a cause"),
            writer.beat,
            reader.beat,
        ]
        random.shuffle(actions)
        for action in actions:
            with contextlib.suppress(WeightlaneError):
                action()
    finally:
        reader.close()
        writer.close()


def test_bytes_that_a_second_writer_put_there_are_seen_by_the_digest(writer: RingWriter) -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    ask(agent, Attach(plan(transport="shm", ring={0: str(writer.path)})))
    sent = WireDigest(WIRES)
    writer.begin(1)
    for bucket, layout in enumerate(LAYOUTS):
        put(writer, bucket)
        sent.update(writer.slot_memory(layout), layout)
    writer.slot_tensor(LAYOUTS[2])[5] ^= 1
    report = ask(agent, RECEIVE)
    assert (report.tensors, report.nbytes) == (3, 94)
    assert report.digest != sent.hexdigest()
    assert not agent.servable


def test_a_ring_sync_that_was_read_is_not_read_again(writer: RingWriter) -> None:
    agent = attached(engine := FakeWorkerEngine())
    ask(agent, Attach(plan(transport="shm", ring={0: str(writer.path)})))
    writer.begin(1)
    for bucket in range(len(LAYOUTS)):
        put(writer, bucket)
    ask(agent, RECEIVE)
    before = list(engine.calls)
    # All its buckets still lie in their slots, so that nothing else would stop a second reading.
    with pytest.raises(ProtocolError, match="Sync 1 of lane lane-1 came after sync 1"):
        ask(agent, RECEIVE)
    assert [call for call in engine.calls[len(before) :] if call != "describe"] == []
    ask(agent, Publish("lane-1", 1, 10))
    assert (agent.servable, agent.held_version) == (True, 10)


# -- by value -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [1, 2])
def test_a_sync_that_has_been_here_is_refused_and_the_open_one_goes_on(again: int) -> None:
    agent = attached(FakeWorkerEngine())
    ask(agent, begin(2))
    ask(agent, load(0, sync=2))
    with pytest.raises(ProtocolError, match=f"Sync {again} of lane lane-1 came after sync 2"):
        ask(agent, begin(again))
    for bucket in (1, 2):
        ask(agent, load(bucket, sync=2))
    ask(agent, FinishInline("lane-1", 2))
    ask(agent, Publish("lane-1", 2, 10))
    assert agent.held_version == 10


def test_a_lane_that_attached_anew_counts_anew() -> None:
    agent = attached(FakeWorkerEngine())
    ask(agent, begin(5))
    ask(agent, Attach(plan()))
    ask(agent, begin(1))


def test_a_cancel_of_another_sync_changes_nothing() -> None:
    agent = attached(engine := FakeWorkerEngine())
    ask(agent, begin(2))
    ask(agent, load(0, sync=2))
    ask(agent, Cancel("lane-1", 1, "an old one"))
    ask(agent, Cancel("another lane", 2, "a stranger"))
    for bucket in (1, 2):
        ask(agent, load(bucket, sync=2))
    ask(agent, FinishInline("lane-1", 2))
    assert torch.equal(engine.held["c"], WEIGHTS["c"])
