"""Running the parity program on several ranks and reading what it found."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from weightlane.testing.parity_result import SyncParity
from weightlane.testing.ranks import RankGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from weightlane.testing.ranks import RankOutcome


def parity_ranks(
    *, model: Path, engine: str, url: str, ranks: int, options: Mapping[str, str | int | float]
) -> RankGroup:
    """Ranks of `weightlane.testing.parity`, not started yet; `options` are its further options."""
    words = ["-m", "weightlane.testing.parity", "--model", str(model), "--engine", engine, "--url", url]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return RankGroup(words, ranks)


def run_parity(
    *,
    model: Path,
    engine: str,
    url: str,
    ranks: int,
    syncs: int,
    seconds: float,
    options: Mapping[str, str | int | float],
    plan_says: str = "",
) -> list[SyncParity]:
    """One result per sync, all of which hold.

    Args:
        model: checkpoint folder of the trainer.
        engine: its backend's engine.
        url: where it is.
        ranks: of the trainer.
        syncs: how many.
        seconds: bound on all of it.
        options: further options of `weightlane.testing.parity`.
        plan_says: words that the lane's plan must hold, such as "coverage proven".

    Raises:
        AssertionError: a rank failed, a sync is missing or does not hold, or the plan says something else;
            shows every rank's output.
        TimeoutError: the ranks were not done within `seconds`.
    """
    with parity_ranks(
        model=model, engine=engine, url=url, ranks=ranks, options={"syncs": syncs, **options}
    ) as group:
        outcomes = group.wait(seconds)
    (found,) = held_parities(outcomes, [syncs], plan_says=plan_says)
    return found


def held_parities(
    outcomes: Sequence[RankOutcome], syncs: Sequence[int], *, plan_says: str = ""
) -> list[list[SyncParity]]:
    """The results of each lane of these ranks, one after the other, all of which hold.

    Args:
        outcomes: of every rank, in order.
        syncs: how many each lane made.
        plan_says: words that a lane's plan must hold.

    Raises:
        AssertionError: as `run_parity` does.
    """
    told = "\n".join(f"--- rank {outcome.rank} ---\n{outcome.output}" for outcome in outcomes)
    found = read_parities(outcomes[0].output)
    expected = [sync for count in syncs for sync in range(1, count + 1)]
    if any(outcome.status for outcome in outcomes) or [parity.sync for parity in found] != expected:
        raise AssertionError(f"not every rank and sync succeeded:\n{told}")
    if plan_says not in outcomes[0].output:
        raise AssertionError(f"the plan does not say {plan_says!r}:\n{told}")
    if not all(parity.holds for parity in found):
        raise AssertionError(f"engine and trainer do not agree:\n{told}")
    rest = iter(found)
    return [list(itertools.islice(rest, count)) for count in syncs]


def read_parities(output: str) -> list[SyncParity]:
    """The results in a rank's output."""
    lines = [line for line in output.splitlines() if line.startswith('{"sync":')]
    return [msgspec.json.decode(line, type=SyncParity) for line in lines]
