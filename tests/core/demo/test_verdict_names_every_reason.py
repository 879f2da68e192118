from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightlane.demo.settings import LIMITS
from weightlane.demo.verdict import judge, reward_gain

if TYPE_CHECKING:
    from weightlane.demo.messages import Closing, StepReport


def reasons(steps: list[StepReport], closing: Closing | None, expected: int = 8) -> tuple[str, ...]:
    verdict = judge(steps, closing, LIMITS, expected_steps=expected)
    assert verdict.passed == (not verdict.reasons)
    return verdict.reasons


def spoiled(steps: list[StepReport], number: int, **fields: Any) -> list[StepReport]:
    return [msgspec.structs.replace(step, **fields) if step.step == number else step for step in steps]


def test_a_good_run_passes(good_steps: list[StepReport], good_closing: Closing) -> None:
    assert reasons(good_steps, good_closing) == ()


def test_a_stale_rollout_fails_for_version_difference_correlation_and_reward(
    stale_steps: list[StepReport], good_closing: Closing
) -> None:
    closing = msgspec.structs.replace(
        good_closing, rollout_versions=(1,), greedy_differing=40, greedy_gap=2.5
    )
    told = reasons(stale_steps, closing)
    assert len(told) == 6
    assert told[0] == (
        "The rollout is stale: in steps 2 to 8 the engine sampled from version 1 while the trainer held "
        "versions 2 to 8."
    )
    assert "At the end the engine served version 1 while the trainer held version 9." in told
    assert any("rollout_probs_diff_mean grew to 0.008 at step 8" in reason for reason in told)
    assert any("rollout_actor_probs_pearson_corr fell to 0.2000 at step 8" in reason for reason in told)
    assert any("The reward went from 0.500 to 0.500" in reason for reason in told)
    assert any("40 of 48 greedy tokens" in reason for reason in told)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout_versions": (2, 3)}, "in step 3 the engine sampled from versions 2 to 3"),
        ({"rollout_versions": (4,)}, "from version 4 while the trainer held version 3"),
        ({"rollout_versions": (None,)}, "did not say which version made its samples in step 3"),
        ({"probs_diff_mean": 2e-4}, "rollout_probs_diff_mean grew to 0.0002 at step 3"),
        ({"probs_diff_mean": math.nan}, "rollout_probs_diff_mean grew to nan at step 3"),
        ({"pearson": 0.9989}, "rollout_actor_probs_pearson_corr fell to 0.9989 at step 3"),
        ({"pearson": None}, "rollout_actor_probs_pearson_corr is undefined in step 3"),
        ({"unchanged_since": 2}, "The sync of step 3 carried the same bytes as version 2"),
    ],
)
def test_one_bad_step_is_one_reason(
    good_steps: list[StepReport], good_closing: Closing, fields: dict[str, Any], words: str
) -> None:
    (reason,) = reasons(spoiled(good_steps, 3, **fields), good_closing)
    assert words in reason


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout_versions": (8,)}, "At the end the engine served version 8"),
        ({"rollout_versions": (None,)}, "At the end the engine served an unknown version"),
        ({"greedy_gap": 2e-4, "greedy_differing": 1}, "1 of 48 greedy tokens"),
        ({"replicas_equal": False}, "no longer equal bit by bit"),
    ],
)
def test_one_bad_closing_check_is_one_reason(
    good_steps: list[StepReport], good_closing: Closing, fields: dict[str, Any], words: str
) -> None:
    (reason,) = reasons(good_steps, msgspec.structs.replace(good_closing, **fields))
    assert words in reason


def test_a_run_that_was_not_finished_fails(good_steps: list[StepReport], good_closing: Closing) -> None:
    (reason,) = reasons(good_steps, good_closing, expected=9)
    assert reason == "Only 8 of 9 steps were reported."
    (reason,) = reasons(good_steps, None)
    assert "the closing check did not take place" in reason


def test_a_reward_that_falls_fails(good_steps: list[StepReport], good_closing: Closing) -> None:
    falling = [msgspec.structs.replace(step, reward=1.0 - step.reward) for step in good_steps]
    (reason,) = reasons(falling, good_closing)
    assert "The reward went from 0.450 to 0.100" in reason


def test_the_gain_compares_quarters(good_steps: list[StepReport]) -> None:
    assert reward_gain(good_steps) == pytest.approx(0.3)
    assert reward_gain(good_steps[:3]) == pytest.approx(0.1)
