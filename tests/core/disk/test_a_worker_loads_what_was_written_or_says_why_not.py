"""The worker's end: a good folder is loaded and reported; a bad one is refused by file and tensor."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import xxhash
from disk_lane import DiskLane
from fake_engine import WEIGHTS, ask

from weightlane.errors import (
    EngineError,
    NotServableError,
    ProtocolError,
    SyncError,
    VerificationError,
)
from weightlane.messages import Attach, CheckResidency, Detach, ReceiveReport
from weightlane.transports import disk_reader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
CHANGED = {"a": torch.arange(3.0) + 1, "b": torch.tensor([False, True]), "c": torch.arange(40).bfloat16() * 2}


def test_what_was_written_is_what_is_loaded_counted_and_digested(lane: DiskLane) -> None:
    digest = lane.write()
    report = lane.load()
    assert (report.tensors, report.loaded, report.nbytes) == (3, 3, lane.plan.nbytes)
    assert (report.sync, report.version, report.digest) == (1, 10, digest)
    assert set(lane.engine.held) == {"a", "b", "c"}  # under the receiver's names, not the checkpoint's
    assert all(torch.equal(lane.engine.held[name], WEIGHTS[name]) for name in WEIGHTS)
    assert not lane.agent.servable
    lane.publish()
    assert (lane.agent.servable, lane.agent.held_version) == (True, 10)


@pytest.mark.parametrize("verify", ["counts", "off"])
def test_below_level_digest_no_digest_is_reported_and_files_are_checked_all_the_same(
    tmp_path: Path, verify: str
) -> None:
    lane = DiskLane(str(tmp_path), verify=verify)
    assert lane.write() == ""
    assert lane.load().digest == ""
    flip(lane.latest / SECOND, -1)
    with pytest.raises(VerificationError, match=r"model\.b"):
        lane.load()
    lane.sink.close()


# -- bad folders that are refused before the first write ---------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut(path: Path, nbytes: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-nbytes])


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest by hand, as somebody who keeps it valid JSON would."""
    path = folder / "weightlane.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def first_tensor(found: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = found["files"][0]["tensors"][0]
    return tensor


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "file missing": (lambda at: (at / THIRD).unlink(), SyncError, rf"{THIRD} cannot be read.*model\.c"),
    "file cut short": (
        lambda at: cut(at / THIRD),
        VerificationError,
        rf"{THIRD} has \d+ bytes, but the trainer wrote \d+; model\.c is not whole",
    ),
    "file cut to nothing": (lambda at: (at / FIRST).write_bytes(b""), VerificationError, r"model\.a is not"),
    "file grown": (
        lambda at: (at / THIRD).write_bytes((at / THIRD).read_bytes() + b"x"),
        VerificationError,
        rf"{THIRD} has \d+ bytes",
    ),
    "file is a link": (lambda at: replace_by_link(at / SECOND), SyncError, rf"{SECOND}.*model\.b.*a link"),
    "file is a pipe": (lambda at: replace_by_pipe(at / SECOND), ProtocolError, f"{SECOND} is not a regular"),
    "file is readable for others": (
        lambda at: (at / SECOND).chmod(0o644),
        ProtocolError,
        f"{SECOND} is not a private file of this user.*0644",
    ),
    "folder is open to others": (lambda at: at.chmod(0o755), ProtocolError, "not a private folder.*0755"),
    "manifest missing": (lambda at: (at / "weightlane.json").unlink(), SyncError, "weightlane.json cannot"),
    "manifest cut short": (lambda at: cut(at / "weightlane.json"), ProtocolError, "could not be read as"),
    "manifest of binary": (
        lambda at: (at / "weightlane.json").write_bytes(b"\xff\xfe"),
        ProtocolError,
        "could not be read as a manifest",
    ),
    "manifest with an unknown field": (
        lambda at: edit(at, lambda found: found.update(exec="x")),
        ProtocolError,
        "unknown field `exec`",
    ),
    "manifest of another format": (
        lambda at: edit(at, lambda found: found.update(format=2)),
        ProtocolError,
        "has format 2; this worker reads format 1",
    ),
    "another version": (
        lambda at: edit(at, lambda found: found.update(version=11)),
        SyncError,
        "is of version 11, not 10",
    ),
    "another lane and sync": (
        lambda at: edit(at, lambda found: found.update(lane="lane-9", sync=4)),
        SyncError,
        "is of lane lane-9, not lane-1, sync 4, not 1",
    ),
    "another plan": (
        lambda at: edit(at, lambda found: found.update(plan_digest="0" * 16)),
        SyncError,
        "is of plan 0000000000000000, not",
    ),
    "a file too few": (
        lambda at: edit(at, lambda found: found["files"].pop()),
        VerificationError,
        "lists 2 files, but the plan has 3 buckets",
    ),
    "a tensor too few": (
        lambda at: edit(at, lambda found: found["files"][0].update(tensors=[])),
        VerificationError,
        f"0 tensors in {FIRST}, the plan has 1: a missing",
    ),
    "a tensor too many": (
        lambda at: edit(at, lambda found: found["files"][0]["tensors"].append(first_tensor(found))),
        VerificationError,
        f"2 tensors in {FIRST}, the plan has 1: a too many",
    ),
    "another shape": (
        lambda at: edit(at, lambda found: first_tensor(found).update(shape=[4])),
        VerificationError,
        rf"{FIRST} holds float32\[4\] 'a' where the plan has float32\[3\] 'a'",
    ),
    "another dtype": (
        lambda at: edit(at, lambda found: first_tensor(found).update(dtype="int32")),
        VerificationError,
        r"int32\[3\] 'a'",
    ),
    "another tensor": (
        lambda at: edit(at, lambda found: first_tensor(found).update(wire="b")),
        VerificationError,
        r"'b' where the plan has float32\[3\] 'a'",
    ),
    "a path out of the folder": (
        lambda at: edit(at, lambda found: found["files"][0].update(name="../../secret")),
        VerificationError,
        rf"lists '../../secret' with \d+ bytes where the plan needs {FIRST}",
    ),
    "a digest changed by hand": (
        lambda at: edit(at, lambda found: first_tensor(found).update(digest="0" * 16)),
        VerificationError,
        "weightlane.json has digest",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_folder_is_refused_before_the_first_write(lane: DiskLane, case: str) -> None:
    spoil, kind, told = REFUSED[case]
    lane.write()
    spoil(lane.latest)
    with pytest.raises(kind, match=told) as caught:
        lane.load()
    assert type(caught.value) is kind
    assert lane.engine.writes == []
    lane.agent.require_servable()
    with pytest.raises(SyncError, match="cannot be published"):
        lane.publish()
    lane.sink.abort("the worker refused", sync=1)
    assert lane.versions() == []
    lane.write(2, 11)
    assert lane.load().version == 11
    lane.publish()


@pytest.mark.parametrize("name", ["..", ".", "", "sync-1-version-10/..", "/etc", "sync-1-version-10/x", "x"])
def test_only_a_syncs_own_folder_is_opened(lane: DiskLane, name: str) -> None:
    lane.write()
    with pytest.raises(ProtocolError, match="not the name of a sync's folder"):
        lane.load(folder=name)
    assert lane.engine.writes == []


def test_a_link_in_place_of_the_version_is_not_followed(lane: DiskLane) -> None:
    lane.write()
    lane.latest.rename(lane.home.parent / "moved")
    lane.latest.symlink_to(lane.home.parent / "moved")
    with pytest.raises(SyncError, match="sync-1-version-10 cannot be read"):
        lane.load()
    assert lane.engine.writes == []


def test_files_of_somebody_else_are_refused(lane: DiskLane, monkeypatch: pytest.MonkeyPatch) -> None:
    lane.write()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ProtocolError, match="should be of user 12345"):
        lane.load()


@pytest.mark.parametrize(
    ("path", "told"),
    [("/no/such/folder", "cannot be opened: No such file"), ("relative", "not an absolute"), ("", "not an")],
)
def test_a_worker_that_does_not_see_the_folder_refuses_to_attach(
    lane: DiskLane, path: str, told: str
) -> None:
    with pytest.raises(ProtocolError, match=told):
        ask(lane.agent, Attach(lane.plan.receive_plan(0, (), path)))
    lane.write()
    lane.load()  # the plan that it held before is still there


# -- files that turn out bad while they are loaded ----------------------------------------------------------


def test_an_altered_first_file_leaves_the_engine_serving(lane: DiskLane) -> None:
    lane.write()
    flip(lane.latest / FIRST, -1)
    with pytest.raises(VerificationError, match=rf"model\.a in .*{FIRST} has digest"):
        lane.load()
    assert lane.engine.writes == []
    lane.agent.require_servable()


@pytest.mark.parametrize(
    ("file", "position", "told"),
    [
        (SECOND, -1, rf"model\.b in .*{SECOND} has digest"),
        (THIRD, -80, rf"model\.c in .*{THIRD} has digest"),
        (SECOND, 30, rf"The header of .*{SECOND} differs from the plan's \(it holds model\.b\)"),
    ],
)
def test_an_altered_later_file_fences_the_engine_until_a_whole_sync(
    lane: DiskLane, file: str, position: int, told: str
) -> None:
    lane.write(1, 10)
    lane.load()
    lane.publish()
    lane.write(2, 11, CHANGED)
    flip(lane.latest / file, position)
    with pytest.raises(VerificationError, match=told):
        lane.load()
    with pytest.raises(NotServableError, match=r"Sync 2 failed after its first write: VerificationError"):
        lane.agent.require_servable()
    with pytest.raises(SyncError, match="cannot be published"):
        lane.publish()
    assert lane.agent.held_version == 10
    lane.sink.abort("the worker found an altered file", sync=2)
    assert lane.versions() == ["sync-1-version-10"]
    digest = lane.write(3, 12, CHANGED)
    assert lane.load().digest == digest
    lane.publish()
    assert (lane.agent.servable, lane.agent.held_version) == (True, 12)
    assert torch.equal(lane.engine.held["c"], CHANGED["c"])
    assert lane.versions() == ["sync-3-version-12"]


def test_a_file_cut_short_between_check_and_read_is_an_error_and_no_crash(
    lane: DiskLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane.write()
    preadv = os.preadv

    def late(descriptor: int, buffers: Any, offset: int) -> int:
        os.truncate(lane.latest / THIRD, 150)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(VerificationError, match=rf"{THIRD} has 150 bytes|{THIRD} ends inside model\.c"):
        lane.load()
    assert not lane.agent.servable


def test_a_read_that_fails_names_the_file(lane: DiskLane, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    lane.write()
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(SyncError, match=rf"{FIRST} cannot be read: Input/output error.*model\.a"):
        lane.load()


def test_a_sync_given_up_by_the_trainer_ends_the_loading(lane: DiskLane) -> None:
    lane.write()
    load = lane.engine.load_weights

    def load_then_lose(tensors: Any) -> int:
        lane.sink.abort("rank 1 died", sync=1)
        return load(tensors)

    lane.engine.load_weights = load_then_lose  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="no version any more: its manifest is gone"):
        lane.load()
    assert not lane.agent.servable


def test_a_loader_that_fails_fences_as_over_every_transport(lane: DiskLane) -> None:
    lane.write()
    lane.engine.raises["load_weights"] = KeyError("lm_head.weight")
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        lane.load()
    assert not lane.agent.servable


# -- residency -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"plan_digest": "p2"}, "does not hold plan p2"),
        ({"lane": "lane-2"}, "it holds none"),
        ({"incarnation": {0: "second"}}, "is incarnation first, the plan was made for second"),
    ],
)
def test_another_plan_or_incarnation_is_refused_before_and_while_receiving(
    lane: DiskLane, changed: dict[str, Any], told: str
) -> None:
    lane.write()
    with pytest.raises(SyncError, match=told):
        lane.load(**changed)
    asked = CheckResidency("lane-1", lane.plan.digest(), {0: "first"})
    assert ask(lane.agent, asked).worker == 0
    with pytest.raises(SyncError, match=told):
        ask(lane.agent, msgspec.structs.replace(asked, **changed))
    assert lane.engine.writes == []
    lane.agent.require_servable()


def test_a_lane_of_another_transport_loads_no_folder(lane: DiskLane) -> None:
    lane.write()
    plan = msgspec.structs.replace(lane.plan.receive_plan(0, ()), transport="inline")
    ask(lane.agent, Attach(plan))
    with pytest.raises(ProtocolError, match="no folder on this worker"):
        lane.load()
    ask(lane.agent, Detach("lane-1"))


# -- negative controls: each check is what finds its fault --------------------------------------------------


def test_without_the_digest_check_altered_weights_would_arrive(
    lane: DiskLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane.write()
    flip(lane.latest / THIRD, -1)
    request = lane.request()
    listed = [digest_in_manifest(lane, number) for number in range(3)]
    calls = iter([request.manifest_digest, *listed])
    monkeypatch.setattr(disk_reader.xxhash, "xxh3_64_hexdigest", lambda data: next(calls))
    report: ReceiveReport = ask(lane.agent, request)
    assert report.loaded == 3
    assert not torch.equal(lane.engine.held["c"], WEIGHTS["c"])
    assert report.digest != msgspec.json.decode((lane.latest / "weightlane.json").read_bytes())["digest"]


def digest_in_manifest(lane: DiskLane, number: int) -> str:
    found = json.loads((lane.latest / "weightlane.json").read_text())
    digest: str = found["files"][number]["tensors"][0]["digest"]
    return digest


def test_without_the_privacy_check_a_strangers_file_would_be_read(
    lane: DiskLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.transports import disk_private

    lane.write()
    (lane.latest / SECOND).chmod(0o644)
    monkeypatch.setattr(disk_private, "_require_private", lambda *_: None)
    assert lane.load().loaded == 3


def test_a_whole_file_of_another_sync_is_found_by_its_digests(lane: DiskLane) -> None:
    lane.write(1, 10)
    lane.load()
    lane.publish()
    old = (lane.latest / THIRD).read_bytes()
    lane.write(2, 11, CHANGED)
    assert len(old) == (lane.latest / THIRD).stat().st_size
    (lane.latest / THIRD).write_bytes(old)
    with pytest.raises(
        VerificationError, match=r"model\.c .*has digest " + xxhash.xxh3_64_hexdigest(old[-80:])
    ):
        lane.load()
