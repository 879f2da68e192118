"""The run folder: made private, refused where others could write, never left, and empty afterwards."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from weightlane.errors import EngineError, ProtocolError
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE, exchange, run_folder, write_answer

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_rank_s_answer_is_read_and_nothing_is_left(run: Path) -> None:
    with exchange() as answers:
        folder = run / answers.token
        assert (mode(run), mode(folder)) == (0o700, 0o700)
        write_answer(answers.token, 1, b"one")
        write_answer(answers.token, 0, b"zero")
        assert mode(folder / "rank-0") == 0o600
        assert answers.answers(3, within_seconds=0.05) == (b"zero", b"one", None)
    assert list(run.iterdir()) == []


def test_names_differ_from_one_exchange_to_the_next() -> None:
    with exchange() as first, exchange() as second:
        assert first.token != second.token
        assert len(first.token) == 32


def test_the_folder_is_gone_after_an_error_too(run: Path) -> None:
    def fail() -> None:
        with exchange() as answers:
            write_answer(answers.token, 0, b"x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(run.iterdir()) == []


def test_both_sides_refuse_a_run_folder_that_others_may_write_in(run: Path) -> None:
    run.mkdir()
    (run / TOKEN).mkdir(mode=0o700)
    run.chmod(0o777)
    with pytest.raises(EngineError, match=r"mode 0777"), exchange():
        pytest.fail("it was taken")
    with pytest.raises(ProtocolError, match=r"mode 0777"):
        write_answer(TOKEN, 0, b"x")
    assert list((run / TOKEN).iterdir()) == []


def test_both_sides_refuse_a_run_folder_that_is_a_link(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / TOKEN).mkdir(mode=0o700)
    run.symlink_to(elsewhere)
    with pytest.raises(EngineError, match="run"), exchange():
        pytest.fail("it was followed")
    with pytest.raises(OSError, match="run"):
        write_answer(TOKEN, 0, b"x")
    assert list((elsewhere / TOKEN).iterdir()) == []


def test_an_exchange_that_is_a_link_or_open_to_others_gets_no_answer(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    run.mkdir(mode=0o700)
    (run / TOKEN).symlink_to(elsewhere)
    with pytest.raises(OSError, match=TOKEN):
        write_answer(TOKEN, 0, b"x")
    (run / TOKEN).unlink()
    (run / TOKEN).mkdir()
    (run / TOKEN).chmod(0o770)
    with pytest.raises(ProtocolError, match=r"mode 0770"):
        write_answer(TOKEN, 0, b"x")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "token", ["../x", "..", "", "/etc", TOKEN + "/..", TOKEN[:-1], TOKEN.upper(), TOKEN + "\n", TOKEN + "0"]
)
def test_a_request_cannot_name_another_place(run: Path, tmp_path: Path, token: str) -> None:
    run.mkdir(mode=0o700)
    (tmp_path / "x").mkdir(mode=0o700)
    with pytest.raises(ProtocolError, match="not the name of an exchange"):
        write_answer(token, 0, b"x")
    assert sorted(item.name for item in tmp_path.rglob("*")) == ["run", "x"]


def test_where_nobody_waits_nothing_is_made(run: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_answer(TOKEN, 0, b"x")
    assert not run.exists()


def test_an_answer_is_not_written_over_a_file_or_a_link_in_its_way(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    with exchange() as answers:
        (run / answers.token / ".rank-0").symlink_to(victim)
        with pytest.raises(FileExistsError):
            write_answer(answers.token, 0, b"x")
    assert victim.read_bytes() == b"precious"


def test_an_answer_that_somebody_else_could_have_put_there_is_not_read(run: Path, tmp_path: Path) -> None:
    with exchange() as answers:
        place = run / answers.token / "rank-0"
        place.write_bytes(b"x")
        place.chmod(0o666)
        with pytest.raises(ProtocolError, match=r"mode 0666"):
            answers.answers(1, within_seconds=0)
        place.unlink()
        os.mkfifo(place, 0o600)
        with pytest.raises(ProtocolError, match="not a regular file"):
            answers.answers(1, within_seconds=0)


def test_a_relative_run_folder_is_refused_and_the_default_is_the_user_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, "here")
    with pytest.raises(EngineError, match="not an absolute path"):
        run_folder()
    monkeypatch.delenv(RUN_FOLDER_VARIABLE)
    assert run_folder() == f"/tmp/weightlane-{os.getuid()}"  # noqa: S108
