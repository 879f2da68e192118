"""PASS or FAIL, and why, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightlane.demo.messages import Closing, StepReport
    from weightlane.demo.settings import Limits


class Verdict(msgspec.Struct, frozen=True):
    """`reasons` is empty for a run that passed."""

    passed: bool
    reasons: tuple[str, ...]

    @property
    def word(self) -> str:
        """PASS or FAIL."""
        return "PASS" if self.passed else "FAIL"


def judge(
    steps: Sequence[StepReport], closing: Closing | None, limits: Limits, *, expected_steps: int
) -> Verdict:
    """Judges a run by everything that it reported."""
    reasons = [
        *_completeness(steps, closing, expected_steps),
        *_versions(steps, closing),
        *_unchanged(steps),
        *_diffs(steps, limits),
        *_correlations(steps, limits),
        *_learning(steps, limits),
        *_greedy(closing, limits),
    ]
    return Verdict(not reasons, tuple(reasons))


def broken(cause: str) -> Verdict:
    """The verdict on a run that could not be finished."""
    return Verdict(passed=False, reasons=(cause,))


def reward_gain(steps: Sequence[StepReport]) -> float:
    """Mean reward of the last quarter of the steps, less that of the first."""
    count = max(1, len(steps) // 4)
    first = sum(step.reward for step in steps[:count]) / count
    return sum(step.reward for step in steps[-count:]) / count - first


def _completeness(steps: Sequence[StepReport], closing: Closing | None, expected: int) -> Iterator[str]:
    if len(steps) != expected or closing is None:
        check = "" if closing else ", and the closing check did not take place"
        yield f"Only {len(steps)} of {expected} steps were reported{check}."
    if closing and not closing.replicas_equal:
        yield "The trainer ranks' copies of the model are no longer equal bit by bit."


def _versions(steps: Sequence[StepReport], closing: Closing | None) -> Iterator[str]:
    unknown = [step.step for step in steps if None in step.rollout_versions]
    if unknown:
        yield f"The engine did not say which version made its samples in {_ranges('step', unknown)}."
    stale = [step for step in steps if {*step.rollout_versions} - {None, step.trainer_version}]
    if stale:
        served = sorted({number for step in stale for number in step.rollout_versions if number is not None})
        held = [step.trainer_version for step in stale]
        yield (
            f"The rollout is stale: in {_ranges('step', [step.step for step in stale])} the engine sampled "
            f"from {_ranges('version', served)} while the trainer held {_ranges('version', held)}."
        )
    if closing and set(closing.rollout_versions) != {closing.trainer_version}:
        served = [number for number in closing.rollout_versions if number is not None]
        told = _ranges("version", served) if served else "an unknown version"
        yield f"At the end the engine served {told} while the trainer held version {closing.trainer_version}."


def _unchanged(steps: Sequence[StepReport]) -> Iterator[str]:
    for step in steps:
        if step.unchanged_since is not None:
            yield (
                f"The sync of step {step.step} carried the same bytes as version {step.unchanged_since}, "
                "although the optimizer had stepped in between."
            )


def _diffs(steps: Sequence[StepReport], limits: Limits) -> Iterator[str]:
    over = [step for step in steps if not step.probs_diff_mean <= limits.probs_diff_mean]
    if over:
        worst = max(over, key=lambda step: step.probs_diff_mean)
        where = _ranges("step", [step.step for step in over])
        yield (
            f"rollout_probs_diff_mean grew to {worst.probs_diff_mean:.3g} at step {worst.step}: the engine "
            "and the trainer gave the same tokens different probabilities "
            f"(limit {limits.probs_diff_mean:.0e}, exceeded in {where})."
        )


def _correlations(steps: Sequence[StepReport], limits: Limits) -> Iterator[str]:
    undefined = [step.step for step in steps if step.pearson is None]
    if undefined:
        yield f"rollout_actor_probs_pearson_corr is undefined in {_ranges('step', undefined)}."
    under = [
        (step.pearson, step.step)
        for step in steps
        if step.pearson is not None and step.pearson < limits.pearson
    ]
    if under:
        worst, number = min(under)
        yield (
            f"rollout_actor_probs_pearson_corr fell to {worst:.4f} at step {number} "
            f"(limit {limits.pearson}, not met in {_ranges('step', [step for _, step in under])})."
        )


def _learning(steps: Sequence[StepReport], limits: Limits) -> Iterator[str]:
    if steps and not reward_gain(steps) >= limits.reward_gain:
        yield (
            f"The reward went from {steps[0].reward:.3f} to {steps[-1].reward:.3f}: what the trainer learned "
            f"does not show in the engine's samples (a gain of {limits.reward_gain:g} is expected)."
        )


def _greedy(closing: Closing | None, limits: Limits) -> Iterator[str]:
    if closing and not closing.greedy_gap <= limits.greedy_gap:
        yield (
            f"{closing.greedy_differing} of {closing.greedy_tokens} greedy tokens of the engine are not the "
            f"trainer's own choice (it prefers another by up to {closing.greedy_gap:.3g} in log-prob)."
        )


def _ranges(noun: str, numbers: Sequence[int]) -> str:
    """`step 3`, `steps 2 to 10`, `steps 1, 4 and 6`."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return f"{noun} {distinct[0]}"
    if distinct[-1] - distinct[0] == len(distinct) - 1:
        return f"{noun}s {distinct[0]} to {distinct[-1]}"
    return f"{noun}s {', '.join(map(str, distinct[:-1]))} and {distinct[-1]}"
