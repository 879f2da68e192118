"""A ring's file is the user's own, mode 0600, of the planned size, and gone with its lane."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from ring_peers import words_of

from weightlane import ring_file
from weightlane.errors import ProtocolError, SyncError
from weightlane.ring import RingReader, RingWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = (64, 128)


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(label="test", slot_sizes=SIZES, peer="worker 0")
    yield ring
    ring.close()


def rings() -> set[Path]:
    return set(ring_file.shared_memory_folder().glob("weightlane-test-*"))


def test_mode_and_name(writer: RingWriter) -> None:
    status = writer.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    other = RingWriter(label="test", slot_sizes=SIZES, peer="worker 0")
    other.close()
    assert other.path != writer.path


def test_the_file_goes_with_the_writer_not_with_the_reader(writer: RingWriter) -> None:
    reader = RingReader(str(writer.path), SIZES)
    reader.close()
    assert writer.path.exists()
    for _ in range(2):
        writer.close()
        assert not writer.path.exists()


def test_after_close_beats_and_aborts_are_harmless(writer: RingWriter) -> None:
    reader = RingReader(str(writer.path), SIZES)
    reader.close()
    writer.close()
    # A beating thread may be one beat late; an abort must never raise.
    writer.beat()
    reader.beat()
    writer.abort("late")


@pytest.mark.parametrize("mode", [0o640, 0o606, 0o666])
def test_a_permissive_file_is_refused(writer: RingWriter, mode: int) -> None:
    writer.path.chmod(mode)
    with pytest.raises(ProtocolError, match=f"{mode:04o}"):
        RingReader(str(writer.path), SIZES)
    writer.path.chmod(0o600)
    RingReader(str(writer.path), SIZES).close()


def test_another_users_file_is_refused(writer: RingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(ring_file.os, "getuid", lambda: owner + 1)
    with pytest.raises(ProtocolError, match=f"owner {owner}"):
        RingReader(str(writer.path), SIZES)


def test_links_folders_and_pipes_are_refused(writer: RingWriter, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(writer.path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (link, pipe, tmp_path, tmp_path / "nothing"):
        with pytest.raises(ProtocolError, match=str(path)):
            RingReader(str(path), SIZES)


def test_another_size_is_refused(writer: RingWriter) -> None:
    with pytest.raises(ProtocolError, match="hold different plans"):
        RingReader(str(writer.path), (64, 64))


def test_a_file_that_is_no_ring_is_refused(writer: RingWriter) -> None:
    words_of(writer)[0] = 0
    with pytest.raises(ProtocolError, match="not a ring of this weightlane version"):
        RingReader(str(writer.path), SIZES)


@pytest.mark.parametrize("count", [0, 17])
def test_no_file_is_left_by_a_ring_that_cannot_be(count: int) -> None:
    before = rings()
    with pytest.raises(ValueError, match="1 to 16 slots"):
        RingWriter(label="test", slot_sizes=(64,) * count, peer="worker 0")
    assert rings() == before


def test_too_little_shared_memory_is_told_now_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring_file.os, "posix_fallocate", no_space)
    before = rings()
    with pytest.raises(SyncError, match="4288 bytes could not be had"):
        RingWriter(label="test", slot_sizes=SIZES, peer="worker 0")
    assert rings() == before
