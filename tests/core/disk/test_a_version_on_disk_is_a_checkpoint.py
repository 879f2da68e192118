"""What rank 0 writes: files that Hugging Face's own tools read, private, whole, and cleared away in time."""

from __future__ import annotations

import json
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from disk_lane import BOUNDS, DiskLane, lane_plan
from fake_engine import WEIGHTS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from weightlane.buckets import lay_out_buckets, wire_nbytes
from weightlane.errors import SyncError, SyncTimeoutError
from weightlane.manifest import DTYPE_BYTES
from weightlane.messages import WireTensor
from weightlane.packing import dtype_name, memory_of, torch_dtype
from weightlane.transports.disk_folder import LaneFolder, close_lane_folder, open_lane_folder
from weightlane.transports.disk_layout import STORED_DTYPES, store_bucket, stored_problems
from weightlane.transports.disk_manifest import FolderManifest
from weightlane.transports.sink import SinkBounds
from weightlane.waiting import nothing_to_check, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def read_with_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def test_files_hold_canonical_names_and_the_index_finds_them(lane: DiskLane) -> None:
    lane.write()
    index = json.loads((lane.latest / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == lane.plan.nbytes
    assert set(index["weight_map"]) == {"model.a", "model.b", "model.c"}
    for name, file in index["weight_map"].items():
        found = read_with_safetensors(lane.latest / file)[name]
        assert torch.equal(found, WEIGHTS[name.removeprefix("model.")])


def test_the_manifest_is_the_lanes_own_with_digests_version_and_sync(lane: DiskLane) -> None:
    digest = lane.write(sync=3, version=-7)
    found = msgspec.json.decode((lane.latest / "weightlane.json").read_bytes(), type=FolderManifest)
    assert found.manifest == lane.plan.manifest
    assert (found.lane, found.sync, found.version, found.digest) == ("lane-1", 3, -7, digest)
    listed = [tensor for file in found.files for tensor in file.tensors]
    assert [(item.wire, item.shape, item.dtype) for item in listed] == [
        (wire.name, wire.shape, wire.dtype) for wire in lane.plan.tensors
    ]
    assert all(len(item.digest) == 16 for item in listed)


def test_everything_is_private_and_nothing_unfinished_is_left(lane: DiskLane) -> None:
    before = os.umask(0)
    try:
        lane.write()
    finally:
        os.umask(before)
    assert stat.S_IMODE(lane.home.stat().st_mode) == 0o700
    assert stat.S_IMODE(lane.latest.stat().st_mode) == 0o700
    files = list(lane.latest.iterdir())
    assert len(files) == 3 + 2
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert not file.name.startswith(".")


def test_the_manifest_is_written_last(lane: DiskLane, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    rename = os.rename

    def noting(source: str, target: str, **where: Any) -> None:
        renamed.append(target)
        rename(source, target, **where)

    monkeypatch.setattr(os, "rename", noting)
    lane.write()
    assert len(renamed) == 5
    assert renamed[-1] == "weightlane.json"


def test_the_published_version_stays_until_the_next_one_is_published(lane: DiskLane) -> None:
    lane.write(1, 10)
    assert lane.versions() == ["sync-1-version-10"]
    lane.load()
    lane.publish()
    lane.write(2, 11)
    assert lane.versions() == ["sync-1-version-10", "sync-2-version-11"]
    lane.load()
    lane.publish()
    assert lane.versions() == ["sync-2-version-11"]
    lane.sink.close()
    assert lane.versions() == ["sync-2-version-11"]


def test_a_failed_sync_leaves_nothing_and_never_takes_the_published_one(lane: DiskLane) -> None:
    lane.write(1, 10)
    lane.load()
    lane.publish()
    lane.sink.begin(2, 11, BOUNDS)
    lane.sink.put(lane.plan.buckets[0], [(0, WEIGHTS["a"])])
    assert lane.versions() == ["sync-1-version-10", "sync-2-version-11"]
    lane.sink.abort("rank 1 died", sync=2)
    assert lane.versions() == ["sync-1-version-10"]
    lane.sink.abort("late", sync=1)
    assert lane.versions() == ["sync-1-version-10"]


def test_a_version_that_was_staged_and_never_published_goes_with_the_next_sync(lane: DiskLane) -> None:
    lane.write(1, 10)
    lane.write(2, 11)
    assert lane.versions() == ["sync-2-version-11"]


def test_a_temporary_folder_is_gone_after_close() -> None:
    lane = DiskLane("")
    lane.write()
    lane.load()
    lane.publish()
    assert lane.versions() == ["sync-1-version-10"]
    lane.sink.close()
    lane.sink.close()
    assert not lane.home.exists()


# -- a writer that cannot write -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda parent: parent.write_text("in the way"), "File exists"),
        (lambda parent: parent.symlink_to(parent.parent / "nowhere"), "File exists"),
        (lambda parent: (parent.mkdir(), parent.chmod(0o777)), "others may rename"),
    ],
)
def test_a_parent_that_cannot_be_used_is_told(tmp_path: Path, make: Any, told: str) -> None:
    parent = tmp_path / "parent"
    make(parent)
    with pytest.raises(SyncError, match=f"Lane lane-1 cannot make its folder in {parent}: .*{told}"):
        LaneFolder("lane-1", str(parent))


def test_a_parent_whose_own_parent_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"no/such: No such file.*folder="):
        LaneFolder("lane-1", str(tmp_path / "no" / "such"))


def test_a_shared_parent_is_fine_where_nobody_can_rename_what_others_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    LaneFolder("lane-1", str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_a_syncs_folder_is_not_followed(lane: DiskLane, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (lane.home / "sync-1-version-10").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SyncError, match="could not be written"):
        lane.write()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_that_vanished_fails_the_sync_by_file_and_tensor(lane: DiskLane) -> None:
    lane.sink.begin(1, 10, BOUNDS)
    (lane.home / "sync-1-version-10").rmdir()
    with pytest.raises(
        SyncError, match=r"model-00001-of-00003.*could not be written.*No such file.*holds model\.a"
    ):
        lane.sink.put(lane.plan.buckets[0], [(0, WEIGHTS["a"])])


def test_a_full_disk_names_file_tensor_and_need(lane: DiskLane, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SyncError, match=r"No space left.*model\.a.*A version has 0\.0 MB.*Free space"):
        lane.write()


class FakeHungFileSystem:
    """Functions of `os` that do not return until `answer`, and notes who asked; the main thread may not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._answer = threading.Event()
        self.asked: list[str] = []
        self._stuck: list[threading.Thread] = []

    def hangs_in(self, *names: str) -> None:
        for name in names:
            self._monkeypatch.setattr(os, name, self._hanging(name, getattr(os, name)))

    def _hanging(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*arguments: Any, **options: Any) -> Any:
            self.asked.append(name)
            self._stuck.append(threading.current_thread())
            if threading.current_thread() is threading.main_thread():
                raise AssertionError(f"os.{name} would never have returned to the caller of the lane")
            self._answer.wait(SECONDS)
            return real(*arguments, **options)

        return hang

    def answer(self) -> None:
        """What hangs is done now, and nothing hangs any more."""
        self._monkeypatch.undo()
        self._answer.set()

    def is_over(self) -> bool:
        """Whether every thread that hung has ended by itself, once answered."""
        return wait_until(lambda: not any(thread.is_alive() for thread in self._stuck), seconds=SECONDS)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHungFileSystem]:
    made = FakeHungFileSystem(monkeypatch)
    yield made
    made.answer()
    assert made.is_over()


SECONDS = 20.0
SHORT = SinkBounds(0.05, 1.0, nothing_to_check)


def in_time(lane: DiskLane, versions: list[str]) -> bool:
    return wait_until(lambda: lane.versions() == versions, seconds=SECONDS)


def test_a_file_system_that_does_not_answer_ends_the_wait_and_removes_nothing(
    lane: DiskLane, hung: FakeHungFileSystem
) -> None:
    lane.sink.begin(1, 10, SHORT)
    hung.hangs_in("fsync", "open", "unlink", "scandir", "rmdir", "close")
    with pytest.raises(SyncTimeoutError, match=r"model-00001.*not written within 0\.05 s.*model\.a"):
        lane.sink.put(lane.plan.buckets[0], [(0, WEIGHTS["a"])])
    lane.sink.abort("too slow")
    lane.sink.close()
    assert hung.asked == ["open"]  # behind the call that hangs no other is tried


def test_a_failed_sync_whose_removal_hangs_still_fails_in_time_and_the_next_one_removes_it(
    lane: DiskLane, hung: FakeHungFileSystem
) -> None:
    lane.sink.begin(1, 10, SHORT)
    hung.hangs_in("rmdir")
    lane.sink.abort("rank 1 died", sync=1)
    assert hung.asked == ["rmdir"]
    assert lane.versions() == ["sync-1-version-10"]
    hung.answer()
    lane.write(2, 11)
    assert in_time(lane, ["sync-2-version-11"])


def test_a_folder_that_cannot_be_started_in_time_fails_the_sync(
    lane: DiskLane, hung: FakeHungFileSystem
) -> None:
    hung.hangs_in("mkdir")
    with pytest.raises(SyncTimeoutError, match=r"its folder in .* was not written within 0\.05 s"):
        lane.sink.begin(1, 10, SHORT)
    lane.sink.abort("too slow", sync=1)
    hung.answer()
    lane.write(2, 11)
    assert in_time(lane, ["sync-2-version-11"])


def test_a_published_version_stays_published_while_the_removal_of_older_ones_hangs(
    lane: DiskLane, hung: FakeHungFileSystem
) -> None:
    lane.write(1, 10)
    lane.load()
    lane.publish()
    lane.write(2, 11, bounds=SHORT)
    lane.load()
    hung.hangs_in("rmdir")
    lane.publish()
    assert hung.asked == ["rmdir"]
    hung.answer()
    lane.sink.begin(3, 12, BOUNDS)
    assert in_time(lane, ["sync-2-version-11", "sync-3-version-12"])


def test_closing_does_not_wait_for_ever(lane: DiskLane, hung: FakeHungFileSystem) -> None:
    lane.sink.begin(1, 10, SHORT)
    hung.hangs_in("rmdir")
    lane.sink.close()
    lane.sink.abort("late", sync=1)
    lane.sink.close()
    assert hung.asked == ["rmdir"]


def test_a_lane_whose_parent_does_not_answer_is_told_at_connect(
    tmp_path: Path, hung: FakeHungFileSystem
) -> None:
    hung.hangs_in("mkdir")
    with pytest.raises(
        SyncTimeoutError, match=f"Lane lane-1 did not get its folder in {tmp_path} within 0.05"
    ):
        open_lane_folder("lane-1", str(tmp_path), 0.05)
    hung.answer()
    folder = open_lane_folder("lane-1", str(tmp_path), SECONDS)
    hung.hangs_in("close")
    close_lane_folder(folder, 0.05)
    assert hung.asked == ["mkdir", "close"]


# -- the format ---------------------------------------------------------------------------------------------

shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 0, 4), (5, 7)])
wires = st.lists(st.tuples(shapes, st.sampled_from(sorted(STORED_DTYPES))), max_size=5)


@settings(max_examples=20, deadline=None)
@given(wires)
def test_every_dtype_and_shape_is_read_back_by_safetensors(
    tmp_path_factory: pytest.TempPathFactory, given_wires: list[tuple[tuple[int, ...], str]]
) -> None:
    tensors = [WireTensor(f"t{number}", shape, dtype) for number, (shape, dtype) in enumerate(given_wires)]
    values = [
        torch.randint(0, 2, (wire_nbytes(tensor),), dtype=torch.uint8)
        .view(torch_dtype(tensor.dtype))
        .view(tensor.shape)
        if wire_nbytes(tensor)
        else torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        for tensor in tensors
    ]
    stored = store_bucket(0, 1, tensors, [tensor.name for tensor in tensors])
    pieces = [stored.header, *(bytes(memory_of(values[item])) for item in stored.order)]
    path = tmp_path_factory.mktemp("file") / stored.name
    path.write_bytes(b"".join(pieces))
    assert path.stat().st_size == stored.nbytes
    for tensor, start in zip(tensors, stored.starts, strict=True):
        assert start % DTYPE_BYTES[tensor.dtype] == 0
    for name, found in read_with_safetensors(path).items():
        value = values[int(name[1:])]
        assert (dtype_name(found.dtype), found.shape) == (dtype_name(value.dtype), value.shape)
        assert bytes(memory_of(found)) == bytes(memory_of(value))


def test_what_the_format_cannot_hold_is_a_problem_of_the_plan() -> None:
    tensors = [WireTensor("a", (1,), "complex128"), WireTensor("b", (1,), "float32")]
    assert [(item.kind, item.subject) for item in stored_problems(tensors, ["x", "__metadata__"])] == [
        ("dtype", "x"),
        ("extra-name", "__metadata__"),
    ]
    assert set(DTYPE_BYTES) - set(STORED_DTYPES) == {
        "complex128",
        "complex32",
        "float4_e2m1fn_x2",
        "float8_e8m0fnu",
    }


def test_a_lane_without_tensors_still_has_a_version(tmp_path: Path) -> None:
    plan = lane_plan(tensors=(), entries=(), buckets=lay_out_buckets(()))
    folder = LaneFolder(plan.lane, str(tmp_path))
    from weightlane.transports.disk import DiskSink

    sink = DiskSink(plan, folder, [])
    sink.begin(1, 1, BOUNDS)
    sink.put(plan.buckets[0], [])
    assert sink.finish() != ""
    sink.close()
