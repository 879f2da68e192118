"""A run that passes, for tests to spoil."""

from __future__ import annotations

import msgspec
import pytest

from weightlane.demo.messages import Closing, StepReport


def good_step(step: int, reward: float) -> StepReport:
    return StepReport(
        step=step,
        trainer_version=step,
        rollout_versions=(step,),
        reward=reward,
        tokens=512,
        probs_diff_mean=1e-8,
        probs_diff_max=1e-7,
        pearson=0.9999999,
        generate_seconds=0.1,
        train_seconds=0.1,
        nbytes=656_640,
        sync_seconds=0.03,
    )


@pytest.fixture
def good_steps() -> list[StepReport]:
    return [good_step(number, 0.5 + 0.05 * number) for number in range(1, 9)]


@pytest.fixture
def good_closing() -> Closing:
    return Closing(
        trainer_version=9,
        rollout_versions=(9,),
        greedy_tokens=48,
        greedy_differing=0,
        greedy_gap=0.0,
        logprob_diff_max=1e-6,
        replicas_equal=True,
    )


@pytest.fixture
def stale_steps(good_steps: list[StepReport]) -> list[StepReport]:
    """As `--no-sync` gives them: the first step is right, the others come from version 1."""
    return [
        msgspec.structs.replace(
            step,
            rollout_versions=(1,),
            reward=0.5,
            probs_diff_mean=1e-8 if step.step == 1 else 1e-3 * step.step,
            pearson=1.0 if step.step == 1 else 1.0 - 0.1 * step.step,
            nbytes=step.nbytes if step.step == 1 else None,
            sync_seconds=step.sync_seconds if step.step == 1 else None,
        )
        for step in good_steps
    ]
