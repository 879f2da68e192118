"""What engines said, and how far two sayings lie apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Said:
    """Greedy continuations of the prompts, and the log-probs of their tokens."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, answer: Sequence[Mapping[str, Any]]) -> Said:
        """From what `probed_engine.py` answers."""
        return cls(
            tuple(tuple(item["tokens"]) for item in answer), tuple(tuple(item["logprobs"]) for item in answer)
        )


def largest_difference(one: Said, two: Said) -> float:
    """Of log-probs, up to and with the first token that differs: what comes after answers another text."""
    found = 0.0
    for row in range(len(one.tokens)):
        for column, (mine, other) in enumerate(zip(one.tokens[row], two.tokens[row], strict=True)):
            found = max(found, abs(one.logprobs[row][column] - two.logprobs[row][column]))
            if mine != other:
                break
    return found


def spread_of(runs: Sequence[Said]) -> float:
    """The largest difference between any two runs."""
    return max((largest_difference(one, two) for one, two in combinations(runs, 2)), default=0.0)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names whose tensor is another, or only on one side."""
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
