"""A SIGKILL in the middle of a sync: every process that is left ends its call, and names the cause."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.ring_file import shared_memory_folder
from weightlane.testing.ranks import RankGroup, RankOutcome
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from conftest import EngineProcess

SECONDS = 30.0
RankMaker = Callable[..., RankGroup]


@pytest.fixture(autouse=True)
def no_ring_is_left() -> Iterator[None]:
    """No ring of a process that is gone may lie about; those of other runs are held by their makers."""
    before = set(shared_memory_folder().glob("weightlane-*.ring"))
    yield
    for path in set(shared_memory_folder().glob("weightlane-*.ring")) - before:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def rings_mapped_by(engine: EngineProcess) -> list[str]:
    maps = Path(f"/proc/{engine.process_id}/maps").read_text().splitlines()
    return [line for line in maps if ".ring" in line]


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("placement", ["replicated", "partitioned"])
def test_a_killed_receiver(
    ranks: RankMaker, start_engine: Callable[..., EngineProcess], placement: str
) -> None:
    engine = start_engine()
    with ranks("slow_sync", 2, [engine.address], placement) as group:
        group.wait_for_output(0, "MOVED A BUCKET", 60)
        engine.kill()
        outcomes = group.wait(60)
    for step in steps_named(outcomes, "slow"):
        assert step.outcome == "error", step
        assert step.type in {"EngineDeadError", "SyncTimeoutError", "SyncError"}
        assert engine.address in step.text
        assert step.seconds < SECONDS
    assert len(steps_named(outcomes, "slow")) == 2
    for step in steps_named(outcomes, "after"):
        assert step.outcome == "error", "a dead engine cannot have taken the next sync"
        assert step.seconds < SECONDS


@pytest.mark.parametrize(
    ("victim", "placement", "world_size"),
    [(1, "replicated", 2), (1, "partitioned", 3), (0, "replicated", 2)],
)
def test_a_killed_trainer_rank(
    ranks: RankMaker, engine: EngineProcess, victim: int, placement: str, world_size: int
) -> None:
    with ranks("slow_sync", world_size, [engine.address], placement) as group:
        group.wait_for_output(0, "MOVED A BUCKET", 60)
        process = group.process_id(victim)
        group.kill(victim)
        outcomes = group.wait(60)
    steps = steps_named(outcomes, "slow")
    assert {step.rank for step in steps} == set(range(world_size)) - {victim}
    for step in steps:
        assert step.outcome == "error", step
        assert f"ank {victim} (process {process}" in step.text, step.text
        assert step.seconds < SECONDS


def test_the_engine_outlives_its_trainers_and_the_next_lane_syncs(
    engine: EngineProcess, outcomes_of: Callable[..., list[RankOutcome]]
) -> None:
    outcomes = outcomes_of("no_op_and_many", 1, [engine.address])
    assert steps_named(outcomes, "many")[0].outcome == "ok"
    # Neither its own rings nor those of all the trainers that were killed before it.
    assert rings_mapped_by(engine) == []
