"""Starts the ranks of a program, and reads what each of them said of each case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.testing.ranks import RankGroup

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 280.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """By rank: "" for a case that passed, or what went wrong."""

    by_rank: tuple[str, ...]

    def require(self) -> None:
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.by_rank) if text]
        assert not failures, "\n".join(failures)


def outcomes_of(program: Path, world_size: int, folder: Path) -> dict[str, Outcome]:
    """All cases that the program ran; a case that a rank did not come to is one that failed there."""
    with RankGroup([str(program), str(folder)], world_size) as group:
        ended = group.wait(SECONDS)
    told = []
    for outcome in ended:
        file = folder / f"{outcome.rank}.json"
        assert outcome.status == 0, f"rank {outcome.rank} ended with {outcome.status}:\n{outcome.output}"
        told.append(json.loads(file.read_text()))
    names = dict.fromkeys(name for rank in told for name in rank)
    return {name: Outcome(tuple(rank.get(name, "not run") for rank in told)) for name in names}
