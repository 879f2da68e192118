"""`demo --locked`: refused before anything starts, or handed to every process that it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.registry
from weightlane.cli import main
from weightlane.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Never

Started = list[Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Environments and arguments of processes that would have been started."""
    found: Started = []

    def refuse(command: Any, *, env: Any, **options: object) -> Never:
        found.append((command, env))
        raise EngineError("Far enough.")

    monkeypatch.setattr("subprocess.Popen", refuse)
    return found


@pytest.fixture
def lock_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of what the demo selects here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEIGHTLANE_LOCKED", raising=False)
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)
    assert main(["lock", "--trainer", "torch", "--rollout", "reference"]) == 0
    return tmp_path / "weightlane.lock"


def other_trainer_era(text: str) -> str:
    return text.replace("state-dict", "older")


def other_engine_era(text: str) -> str:
    return text.replace("transformers-4.50", "older")


def other_version_of_the_plugin(text: str) -> str:
    head, found, tail = text.partition('"engine": "reference"')
    return head + found + tail.replace('"version": "', '"version": "9.', 1)


def another_engine(text: str) -> str:
    return text.replace('"engine": "reference"', '"engine": "other"')


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_trainer_era, "trainer torch: era: the lock names older, here is state-dict"),
        (other_engine_era, "rollout reference: era: the lock names older, here is transformers-4.50"),
        (other_version_of_the_plugin, "rollout reference: version: the lock names weightlane 9."),
        (
            another_engine,
            "rollout reference: backend: the lock names none for this engine, here is reference",
        ),
    ],
)
def test_a_lock_that_the_run_would_break_is_refused_before_anything_starts(
    lock_path: Path,
    started: Started,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[str], str],
    told: str,
) -> None:
    before = lock_path.read_text()
    lock_path.write_text(change(before))
    assert lock_path.read_text() != before
    assert main(["demo", "--locked", "weightlane.lock"]) == 1
    assert told in capsys.readouterr().err
    assert started == []
    assert main(["demo"]) == 1
    assert len(started) == 1  # it was the lock


def test_one_of_several_eras_that_the_lock_names_is_enough(lock_path: Path, started: Started) -> None:
    text = lock_path.read_text()
    row = text[text.index("[") + 1 : text.rindex("]")]
    lock_path.write_text(text.replace(row, other_engine_era(row).rstrip() + "," + row))
    assert main(["demo", "--locked", "weightlane.lock"]) == 1
    assert len(started) == 1


def test_the_lock_reaches_the_ranks_by_their_environment_and_ends_with_the_command(
    lock_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["demo", "--locked", "weightlane.lock", "--report", str(tmp_path / "r.html")]) == 1
    ((command, environment),) = started
    assert command[1:3] == ["-m", "weightlane.demo.rank"]
    assert environment["WEIGHTLANE_LOCKED"] == str(lock_path)  # absolute: a rank may work elsewhere
    assert "WEIGHTLANE_LOCKED" not in os.environ
    assert main(["demo"]) == 1
    assert "WEIGHTLANE_LOCKED" not in started[1][1]
    monkeypatch.setenv("WEIGHTLANE_LOCKED", "mine.lock")
    assert main(["demo", "--locked", "weightlane.lock"]) == 1
    assert started[2][1]["WEIGHTLANE_LOCKED"] == str(lock_path)
    assert os.environ["WEIGHTLANE_LOCKED"] == "mine.lock"


def test_a_rank_that_is_given_a_lock_holds_its_registry_to_it(
    lock_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `connect` then refuses is shown in tests/core/registry/test_connect_keeps_to_a_lock.py."""
    main(["demo", "--locked", "weightlane.lock"])
    ((_, environment),) = started
    held = weightlane.registry.Registry(environ=environment).load().locks.held
    assert held is not None
    assert {(row.role, row.engine) for row in held.lock.backends} == {
        ("trainer", "torch"),
        ("rollout", "reference"),
    }
    del environment["WEIGHTLANE_LOCKED"]
    assert weightlane.registry.Registry(environ=environment).load().locks.held is None
