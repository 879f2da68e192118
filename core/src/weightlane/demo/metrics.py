"""How far the probabilities of sampled tokens differ between the rollout engine and the trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Agreement(msgspec.Struct, frozen=True):
    """Of one set of sampled tokens. `pearson` is None where it is undefined: one side does not vary."""

    diff_mean: float
    diff_max: float
    pearson: float | None


def agreement(rollout_probs: Sequence[float], actor_probs: Sequence[float]) -> Agreement:
    """Compares the probabilities that the engine and the trainer give to the same tokens.

    `diff_mean` is `rollout_probs_diff_mean`, `pearson` is `rollout_actor_probs_pearson_corr`: the same
    quantities under the names that RL frameworks log.

    Args:
        rollout_probs: as the engine reported them when it sampled, not empty.
        actor_probs: recomputed by the trainer, in the same order.

    Raises:
        ValueError: the two have different lengths, or are empty.
    """
    if len(rollout_probs) != len(actor_probs) or not rollout_probs:
        raise ValueError(f"{len(rollout_probs)} rollout and {len(actor_probs)} actor probabilities")
    diffs = [abs(rollout - actor) for rollout, actor in zip(rollout_probs, actor_probs, strict=True)]
    return Agreement(math.fsum(diffs) / len(diffs), max(diffs), pearson(rollout_probs, actor_probs))


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation coefficient, -1 to 1; None where a side does not vary or is not finite."""
    if not all(math.isfinite(value) for values in (first, second) for value in values):
        return None
    mean_first, mean_second = math.fsum(first) / len(first), math.fsum(second) / len(second)
    from_first = [value - mean_first for value in first]
    from_second = [value - mean_second for value in second]
    spread = math.sqrt(
        math.fsum(value * value for value in from_first) * math.fsum(value * value for value in from_second)
    )
    if spread == 0.0:
        return None
    covariance = math.fsum(one * other for one, other in zip(from_first, from_second, strict=True))
    return max(-1.0, min(1.0, covariance / spread))
