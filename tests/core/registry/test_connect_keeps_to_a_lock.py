"""`connect(locked=...)`: refused before any engine is asked for anything."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

import weightlane as wl
import weightlane.registry
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.errors import EngineError, LockError
from weightlane.facts import EngineFacts
from weightlane.lock_file import read_lock
from weightlane.selection import select

if TYPE_CHECKING:
    from pathlib import Path

BOUNDS = dataclasses.replace(DEFAULT_BOUNDS, connect=5.0)


@pytest.fixture
def lock_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)
    path = tmp_path / "weightlane.lock"
    registry = weightlane.registry.get_registry()
    select(registry, "trainer", "torch", registry.collect_facts("torch"))
    wl.write_lock(path)
    return path


def connect(tmp_path: Path, locked: Path | None) -> None:
    wl.connect(
        trainer=wl.trainer("torch", model={"weight": torch.zeros(2)}),
        rollout=[wl.rollout("reference", url=f"unix:{tmp_path}/nobody.sock")],
        bounds=BOUNDS,
        locked=locked,
    ).close()


def test_a_trainer_that_the_lock_does_not_name_is_refused_first(tmp_path: Path, lock_path: Path) -> None:
    lock_path.write_text(lock_path.read_text().replace("state-dict", "older"))
    with pytest.raises(LockError, match="trainer torch: era: the lock names older, here is state-dict"):
        connect(tmp_path, lock_path)


def test_with_the_lock_as_written_the_same_call_gets_as_far_as_the_engine(
    tmp_path: Path, lock_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"nobody.sock"):
        connect(tmp_path, lock_path)


def test_a_lock_of_the_environment_counts_too(
    tmp_path: Path, lock_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path.write_text(lock_path.read_text().replace("state-dict", "older"))
    monkeypatch.setenv("WEIGHTLANE_LOCKED", str(lock_path))
    with pytest.raises(LockError, match="by WEIGHTLANE_LOCKED"):
        connect(tmp_path, None)


def test_an_engine_that_was_not_locked_is_refused(
    tmp_path: Path, lock_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [row.role for row in read_lock(lock_path).backends] == ["trainer"]

    def collect_facts(self: object, engine: str, target: object = None) -> EngineFacts:
        return EngineFacts(engine=engine, version="5.0" if target else "2.13.0", source="worker")

    monkeypatch.setattr(weightlane.registry.Registry, "collect_facts", collect_facts)
    with pytest.raises(LockError, match="rollout reference: backend: the lock names none for this engine"):
        connect(tmp_path, lock_path)
