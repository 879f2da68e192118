"""What stands under a key of the control channel is read like any message, and what cannot be put is told."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from damage import damaged
from every_message import FAILURE, LANE

from weightlane.agreement import put_outcome
from weightlane.errors import EngineError, ProtocolError, WeightlaneError
from weightlane.lane_messages import Committed, SyncStart
from weightlane.rendezvous import open_control_channel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.control import ControlChannel


@pytest.fixture
def channel() -> Iterator[ControlChannel]:
    channel = open_control_channel(
        address=None, lane="attack", rank=0, world_size=1, seconds=10.0, lost_after=10.0
    )
    yield channel
    channel.close()


def put_raw(channel: ControlChannel, key: str, data: bytes) -> None:
    channel._store.set(f"attack/{key}", data)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 9999, b"\x80", b"\xff"])
def test_garbage_is_a_protocol_error(channel: ControlChannel, data: bytes) -> None:
    put_raw(channel, "it", data)
    with pytest.raises(ProtocolError, match="control channel key it"):
        channel.get("it", Committed, seconds=5.0, awaited=())
    put_raw(channel, "abort/sync-1", data)
    with pytest.raises(ProtocolError, match="an abort"):
        channel.check_abort("sync-1")


def test_damaged_values_are_typed_errors(channel: ControlChannel) -> None:
    random = Random(3)
    for number, message in enumerate([*LANE, FAILURE] * 8):
        kind = type(message) if message is not FAILURE else Committed
        put_raw(channel, str(number), damaged(message, random))
        try:
            read = channel.get(str(number), kind, seconds=5.0, awaited=())
        except WeightlaneError:
            continue
        assert isinstance(read, kind)


@pytest.mark.parametrize("version", [1 << 70, object(), 1j])
def test_an_outcome_that_cannot_be_encoded_is_told_to_whoever_waits(
    channel: ControlChannel, version: int
) -> None:
    put_outcome(channel, "start", lambda: SyncStart(version, "digest"))
    with pytest.raises(EngineError, match=r"OverflowError|TypeError"):
        channel.get("start", SyncStart, seconds=5.0, awaited=())


def test_a_version_that_is_no_number_is_a_protocol_error(channel: ControlChannel) -> None:
    put_outcome(channel, "start", lambda: SyncStart("three", "digest"))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"Expected `int`, got `str`.*version"):
        channel.get("start", SyncStart, seconds=5.0, awaited=())
