"""Steps of a rank program: what was tried on a rank, how it ended, and how long it took."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from weightlane.errors import PlanError, WeightlaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightlane.testing.ranks import RankOutcome

_T = TypeVar("_T")
_PREFIX = "STEP "
Outcome: TypeAlias = Literal["ok", "error", "told"]


class Step(msgspec.Struct, frozen=True):
    """One line of a rank's output.

    `type` and `text` are the error's class and words (a PlanError's problems, one a line); `facts` what a
    scenario wants to tell beside success or failure.
    """

    step: str
    rank: int
    outcome: Outcome
    type: str = ""
    text: str = ""
    seconds: float = 0.0
    facts: dict[str, list[str | int | None]] = {}


def take_step(name: str, rank: int, action: Callable[[], _T]) -> _T | None:
    """Does `action`, prints how it ended, and gives its result; a WeightlaneError is printed, not raised."""
    started = time.monotonic()
    try:
        result = action()
    except WeightlaneError as error:
        text = str(error)
        if isinstance(error, PlanError):
            text = "\n".join(str(problem) for problem in error.problems)
        _print(Step(name, rank, "error", type(error).__name__, text, time.monotonic() - started))
        return None
    _print(Step(name, rank, "ok", seconds=time.monotonic() - started))
    return result


def tell(name: str, rank: int, facts: dict[str, list[str | int | None]]) -> None:
    """Prints facts under a step's name."""
    _print(Step(name, rank, "told", facts=facts))


def steps_named(outcomes: Sequence[RankOutcome], name: str) -> list[Step]:
    """That step on every rank that took it, in rank order.

    Raises:
        LookupError: no rank took it, so that a test about it would assert nothing; shows all output.
    """
    found = [
        step
        for outcome in outcomes
        for line in outcome.output.splitlines()
        if line.startswith(_PREFIX)
        for step in [msgspec.json.decode(line.removeprefix(_PREFIX), type=Step)]
        if step.step == name
    ]
    if not found:
        told = "\n".join(f"--- rank {outcome.rank} ---\n{outcome.output}" for outcome in outcomes)
        raise LookupError(f"no rank took step {name!r}\n{told}")
    return found


def _print(step: Step) -> None:
    sys.stdout.write(f"{_PREFIX}{msgspec.json.encode(step).decode()}\n")
    sys.stdout.flush()
