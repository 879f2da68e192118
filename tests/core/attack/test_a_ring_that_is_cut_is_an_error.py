"""A ring's file that is cut under its users ends in typed errors, where touching it would end the process."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from ring_victims import SIZES, agent_meets_a_cut_ring, touches_what_was_cut, uses_both_ends

from weightlane.errors import ProtocolError
from weightlane.ring import RingReader, RingWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("cut_to", [0, 8, 4096])
def test_both_ends_tell_it(start_peer: Callable[..., Any], cut_to: int) -> None:
    with start_peer(uses_both_ends, cut_to) as peer:
        for action, (error, text) in peer.told().items():
            assert error == "ProtocolError", (action, text)
            assert f"was cut to {cut_to} of" in text
        assert peer.told() == "alive"
        peer.process.join(10)
        assert peer.process.exitcode == 0


def test_touching_it_unseen_ends_the_process(start_peer: Callable[..., Any], tmp_path: Path) -> None:
    # The control: this is what the checks above prevent.
    (tmp_path / "file").touch()
    with start_peer(touches_what_was_cut, str(tmp_path / "file")) as peer:
        assert peer.told() == "about to touch"
        peer.process.join(10)
        assert peer.process.exitcode == -signal.SIGBUS


def test_an_agent_answers_it_and_stays_servable(start_peer: Callable[..., Any]) -> None:
    with start_peer(agent_meets_a_cut_ring) as peer:
        error, text = peer.told()
        assert (error, "was cut to 100 of" in text) == ("ProtocolError", True)
        assert peer.told() == (True, [])


def test_once_the_reader_has_it_nobody_can_open_it_by_name() -> None:
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    reader = RingReader(str(writer.path), SIZES)
    try:
        writer.hide()
        assert not writer.path.exists()
        with pytest.raises(ProtocolError, match="cannot be opened"):
            RingReader(str(writer.path), SIZES)
        # Both ends go on with what has no name any more.
        writer.begin(1)
        reader.begin(1)
    finally:
        reader.close()
        writer.close()


def test_a_second_name_is_refused_since_it_would_outlive_the_first(tmp_path: Path) -> None:
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    other = writer.path.with_name(writer.path.name + "-other")
    try:
        other.hardlink_to(writer.path)
        with pytest.raises(ProtocolError, match="2 names"):
            RingReader(str(writer.path), SIZES)
        other.unlink()
        RingReader(str(writer.path), SIZES).close()
    finally:
        other.unlink(missing_ok=True)
        writer.close()


def test_a_path_that_was_swapped_for_a_link_is_refused() -> None:
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    away = writer.path.with_name(writer.path.name + "-away")
    try:
        writer.path.rename(away)
        writer.path.symlink_to(away)  # to the very ring, so that nothing but the link itself is wrong
        with pytest.raises(ProtocolError, match="cannot be opened"):
            RingReader(str(writer.path), SIZES)
    finally:
        away.unlink(missing_ok=True)
        writer.close()


@pytest.mark.parametrize(
    "path", ["", "a\x00b", "/", "/dev/null", "/proc/self/mem", "\udcff\ud800", "x" * 5000]
)
def test_paths_that_lead_elsewhere_are_protocol_errors(path: str) -> None:
    with pytest.raises(ProtocolError, match="Ring"):
        RingReader(path, SIZES)
