"""Starts the ranks of a program, and reads what each of them said of each case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.testing.ranks import RankGroup

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECONDS = 280.0
SECONDS_AFTER_A_FAILURE = 10.0


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What each rank said of each case ("" for one that passed), and how the ranks ended."""

    by_rank: tuple[Mapping[str, str], ...]
    endings: tuple[str, ...]

    def require(self, case: str) -> None:
        """A case that a rank did not come to is one that failed there."""
        said = [rank.get(case, "this case was not run") for rank in self.by_rank]
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        assert not failures, "\n".join((*failures, *self.endings))


def outcomes_of(program: Path, world_size: int, folder: Path) -> Outcomes:
    """All cases that the program ran. Never raises for what a rank did: the tests of its cases tell it."""
    with RankGroup([str(program), str(folder)], world_size) as group:
        ended = group.wait(SECONDS, after_a_failure=SECONDS_AFTER_A_FAILURE)
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    return Outcomes(
        tuple(json.loads(file.read_text()) if file.exists() else {} for file in files),
        tuple(
            f"rank {outcome.rank} ended with {outcome.status}:\n{outcome.output[-3000:]}"
            for outcome in ended
            if outcome.status
        ),
    )
