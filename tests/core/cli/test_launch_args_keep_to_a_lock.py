"""`launch-args` under a lock, by option and by environment: what it names is planned, the rest refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

WORDS = ("launch-args", "reference", "--device", "cpu")


@pytest.fixture
def lock_path(run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of the reference engine, as it is selected here."""
    monkeypatch.chdir(tmp_path)
    assert run("lock", "--rollout", "reference").status == 0
    return tmp_path / "weightlane.lock"


def by_option(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Run:
    return run(*WORDS, "--locked", "weightlane.lock", "--json")


def by_environment(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WEIGHTLANE_LOCKED", str(Path("weightlane.lock").absolute()))
    return run(*WORDS, "--json")


@pytest.mark.parametrize("locked", [by_option, by_environment])
def test_what_the_lock_names_is_planned_and_anything_else_is_refused(
    run: Callable[..., Run], lock_path: Path, monkeypatch: pytest.MonkeyPatch, locked: Callable[..., Run]
) -> None:
    plain = run(*WORDS, "--json").document
    met = locked(run, monkeypatch)
    assert (met.status, met.document) == (0, plain)
    lock_path.write_text(lock_path.read_text().replace("transformers-4.50", "older"))
    refused = locked(run, monkeypatch)
    error: Any = refused.document["error"]
    assert (refused.status, error["type"]) == (1, "LockError")
    assert "rollout reference: era: the lock names older, here is transformers-4.50" in error["why"]
    monkeypatch.delenv("WEIGHTLANE_LOCKED", raising=False)
    assert run(*WORDS).status == 0  # it was the lock


def test_an_engine_that_the_lock_leaves_out_is_refused(run: Callable[..., Run], lock_path: Path) -> None:
    lock_path.write_text(lock_path.read_text().replace('"engine": "reference"', '"engine": "other"'))
    done = run(*WORDS, "--locked", "weightlane.lock")
    assert (done.status, done.out) == (1, "")
    assert "rollout reference: backend: the lock names none for this engine" in done.err


def test_an_option_goes_before_the_environment(
    run: Callable[..., Run], lock_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_LOCKED", "nowhere.lock")
    assert run(*WORDS, "--locked", "weightlane.lock").status == 0
    done = run(*WORDS)
    assert (done.status, "The lock nowhere.lock cannot be opened." in done.err) == (1, True)
