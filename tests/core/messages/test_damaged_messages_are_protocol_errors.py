"""Every message of every channel, damaged in its fields or bytes: it is read, or it is a ProtocolError."""

from __future__ import annotations

import contextlib
import resource
from random import Random
from typing import Any

import msgspec
import pytest
from damage import ODD_BYTES, damaged
from every_message import DEMO, EVERY
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane import messages as m
from weightlane.demo import messages as dm
from weightlane.errors import ProtocolError
from weightlane.failures import Failure, error_of

ODD_JSON = [b"\xff", b"\xc3\x28", b"[" * 5000, b"1e999", b"null", b'"', b"}", b"\\ud800", b"\x00"]


def memory_mib() -> float:
    """The most that this process has ever held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(("message", "union"), EVERY, ids=lambda item: type(item).__name__)
def test_undamaged_it_arrives(message: msgspec.Struct, union: Any) -> None:
    assert m.decode(m.encode(message), union, sender="x") == message


@settings(max_examples=100)
@given(st.integers(0, 1 << 32))
def test_damaged_it_is_read_or_is_a_protocol_error(seed: int) -> None:
    random = Random(seed)
    for message, union in EVERY:
        data = damaged(message, random)
        try:
            read = m.decode(data, union, sender="the far side")
        except ProtocolError:
            continue
        assert isinstance(read, msgspec.Struct)
        m.encode(read)
        if isinstance(read, Failure):
            assert str(error_of(read))


def test_damage_is_mostly_seen() -> None:
    # The control of the test above: a reader that took anything would pass it as well.
    random, refused = Random(0), 0
    for _ in range(40):
        for message, union in EVERY:
            try:
                m.decode(damaged(message, random), union, sender="x")
            except ProtocolError:
                refused += 1
    assert refused > 0.6 * 40 * len(EVERY)


@pytest.mark.parametrize("data", ODD_BYTES, ids=lambda data: data[:6].hex())
def test_what_a_header_claims_is_not_allocated(data: bytes) -> None:
    before = memory_mib()
    for message, union in EVERY:
        raw = m.encode(message)
        for place in range(min(len(raw), 60)):
            with contextlib.suppress(ProtocolError):
                m.decode(raw[:place] + data, union, sender="x")
    # 4 GiB are claimed, elements of 8 bytes each at that.
    assert memory_mib() - before < 64


BOUNDS: list[tuple[msgspec.Struct, Any, str]] = [
    (message, union, name)
    for message, union, names in [
        (m.Receive("lane", "d1", 3, 4, {}, 5.0, 6.5), m.AgentRequest, ["wait_seconds", "lost_after_seconds"]),
        (m.CallWorkers(b"x", 1.0), m.FrontRequest, ["timeout_seconds"]),
        (m.CallEngine("x", 1.0), m.FrontRequest, ["timeout_seconds"]),
        (m.Generate(((1,),), 4), m.FrontRequest, ["temperature"]),
    ]
    for name in names
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize(("message", "union", "name"), BOUNDS, ids=lambda item: str(item)[:20])
def test_a_bound_that_bounds_nothing_is_refused(
    message: msgspec.Struct, union: Any, name: str, value: float
) -> None:
    with pytest.raises(ProtocolError, match=name):
        m.decode(m.encode(msgspec.structs.replace(message, **{name: value})), union, sender="x")


@pytest.mark.parametrize("sync", [0, -1, 1 << 39, (1 << 64) - 1])
def test_a_sync_that_no_ring_can_count_is_refused(sync: int) -> None:
    for message in (
        m.Receive("lane", "d1", sync, 4, {}, 5.0, 6.5),
        m.BeginInline("lane", "d1", sync, 4, {}),
        m.ReceiveDisk("lane", "d1", sync, 4, {}, "1", "0"),
        m.LoadInline("lane", sync, 0, b""),
        m.FinishInline("lane", sync),
        m.Publish("lane", sync, 4),
        m.Cancel("lane", sync, "why"),
    ):
        with pytest.raises(ProtocolError, match=r"\$\.sync"):
            m.decode(m.encode(message), m.AgentRequest, sender="x")


# -- the demo's lines ---------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(0, 1 << 32))
def test_a_damaged_line_of_the_demo_is_read_or_is_a_protocol_error(seed: int) -> None:
    random = Random(seed)
    for message in DEMO:
        line = bytearray(dm.line_of(message))
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(line))
            line[place : place + random.randint(0, 5)] = random.choice(ODD_JSON)
        try:
            read = dm.read_rank_message(bytes(line), rank=1)
        except ProtocolError:
            continue
        assert isinstance(read, msgspec.Struct)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_deeply_nested_line_is_a_protocol_error(opening: bytes) -> None:
    with pytest.raises(ProtocolError, match="Trainer rank 0"):
        dm.read_rank_message(opening * 100_000, rank=0)
