"""`weightlane lock`, and `--locked` of the commands that select."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.registry
from weightlane.cli import main
from weightlane.lock_file import read_lock

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakeSite

Run = Any
"""Words to exit status, standard output and standard error; a fresh registry each time."""


@pytest.fixture
def run(site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(site.folder)
    site.plugin("acme-lane", site.source(), entry="acme")

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(weightlane.registry, "_process_registry", None)
        status = main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def lock_path(site: FakeSite, run: Run) -> Path:
    site.engine("acme-engine", "1.5")
    assert run("lock")[0] == 0
    return site.folder / "weightlane.lock"


def age(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": "1.0"', '"version": "0.9"'))


def test_every_engine_installed_here_is_locked_and_the_others_are_named(site: FakeSite, run: Run) -> None:
    site.engine("acme-engine", "1.5")
    site.plugin("other-lane", site.source(engine="other").replace("acme-engine", "other-engine"))
    status, out, _ = run("lock")
    assert status == 0
    assert (
        "rollout acme: acme (only) of acme-lane 1.0\n  acme 1.5 (as installed here) fits acme <2,>=1" in out
    )
    assert "not locked: rollout other, since other is not installed here" in out
    assert "Wrote weightlane.lock with 1 backend." in out
    assert [row.engine for row in read_lock(site.folder / "weightlane.lock").backends] == ["acme"]


def test_json_holds_the_lock_as_it_was_written(site: FakeSite, run: Run) -> None:
    site.engine("acme-engine", "1.5")
    status, out, _ = run("lock", "--rollout", "acme", "--out", "other.lock", "--json")
    assert status == 0
    assert json.loads(out)["lock"] == json.loads((site.folder / "other.lock").read_text())


def test_an_engine_asked_for_by_name_must_be_selectable(site: FakeSite, run: Run) -> None:
    status, _, err = run("lock", "--rollout", "acme")
    assert status == 1
    assert "acme of unknown version (it is not installed here and no engine told)" in err
    status, _, err = run("lock", "--rollout", "acme", "--trainer", "torchh")
    assert "Of 2 engines 2 cannot be selected." in err
    assert not (site.folder / "weightlane.lock").exists()


def test_where_nothing_is_installed_nothing_is_locked(site: FakeSite, run: Run) -> None:
    status, _, err = run("lock")
    assert (status, "nothing to lock" in err) == (1, True)


def test_a_live_engine_is_asked_at_its_url(site: FakeSite, run: Run) -> None:
    more = """
    from weightlane.facts import EngineFacts

    @hookimpl
    def weightlane_collect_facts(context):
        if context.target is not None:
            version = context.target.address.rpartition("/")[2]
            return EngineFacts(engine="acme", version=version, source="server")
    """
    site.remove("acme-lane")
    site.plugin("acme-lane", site.source(more=more), entry="acme", version="1.1")
    assert run("lock", "--rollout", "acme", "--url", "http://x.invalid/1.7")[0] == 0
    (row,) = read_lock(site.folder / "weightlane.lock").backends
    assert row.engine_version == "1.7"
    assert "acme 1.7 (as the live server says) fits" in row.evidence[0]
    status, _, err = run("lock", "--rollout", "acme", "--url", "http://x.invalid/3.0")
    assert (status, "found acme 3.0" in err) == (1, True)


@pytest.mark.parametrize(
    "words", [["--url", "http://x"], ["--url", "http://x", "--rollout", "a", "--rollout", "b"], ["acme"]]
)
def test_wrong_usage_exits_with_two(run: Run, words: list[str]) -> None:
    assert run("lock", *words)[0] == 2


def test_a_lock_that_is_met_is_said_to_be(lock_path: Path, run: Run) -> None:
    before = lock_path.read_text()
    status, out, _ = run("lock", "--locked", "weightlane.lock")
    assert (status, out) == (0, "What is selected here is what weightlane.lock names.\n")
    assert lock_path.read_text() == before


def test_a_lock_that_is_not_met_fails_with_every_difference(lock_path: Path, run: Run) -> None:
    age(lock_path)
    status, _, err = run("lock", "--locked", "weightlane.lock")
    assert status == 1
    assert "rollout acme: version: the lock names acme-lane 0.9, here is acme-lane 1.0" in err
    assert "pip install 'acme-lane==0.9'" in err
    status, out, _ = run("lock", "--locked", "weightlane.lock", "--json")
    (difference,) = json.loads(out)["differences"]
    assert (status, difference["field"], difference["locked"]) == (1, "version", "acme-lane 0.9")


def test_without_its_engine_the_plugin_of_a_lock_is_compared_alone(
    site: FakeSite, lock_path: Path, run: Run
) -> None:
    site.remove("acme-engine")
    status, out, _ = run("lock", "--locked", "weightlane.lock")
    assert status == 0
    assert "only its plugin was compared: rollout acme: acme is not installed here" in out
    age(lock_path)
    assert run("lock", "--locked", "weightlane.lock")[0] == 1


def test_an_engine_that_fits_no_longer_is_a_difference(site: FakeSite, lock_path: Path, run: Run) -> None:
    site.remove("acme-engine")
    site.engine("acme-engine", "2.5")
    status, _, err = run("lock", "--locked", "weightlane.lock")
    assert status == 1
    assert (
        "the lock names acme (only) of acme-lane 1.0, here is none, since No rollout backend fits acme" in err
    )
    assert "Use the engines and the pins that it was written with" in err


def test_a_lock_of_the_environment_does_not_keep_one_from_writing_another(
    lock_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(lock_path)
    monkeypatch.setenv("WEIGHTLANE_LOCKED", str(lock_path))
    assert run("lock")[0] == 0
    assert read_lock(lock_path).backends[0].version == "1.0"


def test_doctor_and_backends_keep_to_a_lock(
    lock_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("doctor", "--locked", "weightlane.lock")[0] == 0
    assert "active  yes" in run("backends", "--locked", "weightlane.lock")[1]
    age(lock_path)
    status, out, _ = run("doctor", "--locked", "weightlane.lock")
    assert status == 1
    assert "the lock names acme-lane 0.9, here is acme-lane 1.0" in out
    assert "the lock refuses it" in run("backends", "--locked", "weightlane.lock")[1]
    assert run("doctor")[0] == 0
    monkeypatch.setenv("WEIGHTLANE_LOCKED", str(lock_path))
    assert run("doctor")[0] == 1


def test_doctor_does_not_mind_an_engine_here_that_the_lock_leaves_out(
    site: FakeSite, lock_path: Path, run: Run
) -> None:
    site.engine("other-engine", "1.5")
    site.plugin("other-lane", site.source(engine="other").replace("acme-engine", "other-engine"))
    status, out, _ = run("doctor", "--locked", "weightlane.lock")
    assert (status, "weightlane.lock does not name it" in out) == (0, True)
    assert run("doctor", "other", "--locked", "weightlane.lock")[0] == 1


def test_doctor_names_a_locked_plugin_that_is_gone(site: FakeSite, lock_path: Path, run: Run) -> None:
    site.remove("acme-lane")
    status, out, _ = run("doctor", "--locked", "weightlane.lock")
    assert status == 1
    assert "pip install 'acme-lane==1.0'" in out


@pytest.mark.parametrize("command", ["doctor", "backends", "demo", "lock", "launch-args acme"])
def test_a_lock_that_is_not_there_is_one_typed_error(run: Run, command: str) -> None:
    status, out, err = run(*command.split(), "--locked", "nowhere.lock")
    assert (status, out) == (1, "")
    assert err.splitlines()[0] == "The lock nowhere.lock cannot be opened."
