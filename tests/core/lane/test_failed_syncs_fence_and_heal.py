"""What a failed sync leaves behind: a fenced receiver that says why, and a lane that can heal it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import EngineProcess

    from weightlane.testing.ranks import RankOutcome


@pytest.fixture(scope="module")
def drifted(outcomes_of: Callable[..., list[RankOutcome]], engine: EngineProcess) -> list[RankOutcome]:
    return outcomes_of("drift", 2, [engine.address])


def test_a_model_changed_after_connect_fails_the_sync_by_name_on_all_ranks(
    drifted: list[RankOutcome],
) -> None:
    texts = [step.text for step in steps_named(drifted, "changed shape")]
    assert len(texts) == 2
    for text in texts:
        assert "lm_head.weight" in text or "norm.weight" in text
        assert "in the manifest" in text
        assert "not published" in text


def test_an_export_refused_before_its_first_bucket_leaves_the_engine_serving(
    drifted: list[RankOutcome],
) -> None:
    (step,) = steps_named(drifted, "generate after refused export")
    assert step.outcome == "ok"


def test_commit_without_stage_and_sync_on_a_closed_lane_are_typed_errors(drifted: list[RankOutcome]) -> None:
    for name, words in (("commit without stage", "nothing staged"), ("closed lane", "is closed")):
        for step in steps_named(drifted, name):
            assert step.type == "SyncError"
            assert words in step.text


def test_the_next_sync_heals_and_generations_carry_its_version(drifted: list[RankOutcome]) -> None:
    assert [step.outcome for step in steps_named(drifted, "healed")] == ["ok", "ok"]
    (told,) = steps_named(drifted, "versions")
    assert told.facts["versions"] == [3]


@pytest.fixture(scope="module")
def diverged(
    outcomes_of: Callable[..., list[RankOutcome]],
    engine: EngineProcess,
    start_engine: Callable[..., EngineProcess],
) -> list[RankOutcome]:
    return outcomes_of("diverged", 2, [engine.address, start_engine().address])


def test_trainer_ranks_whose_copies_diverged_are_caught_by_their_digests(diverged: list[RankOutcome]) -> None:
    assert [step.outcome for step in steps_named(diverged, "equal")] == ["ok", "ok"]
    for step in steps_named(diverged, "diverged"):
        assert step.type == "VerificationError"
        assert "rank 0" in step.text
        assert "rank 1" in step.text
        assert "fenced" in step.text


@pytest.mark.requirement("R68", part="full weights")
def test_a_verified_but_unpublished_replica_refuses_to_generate_and_says_why(
    diverged: list[RankOutcome],
) -> None:
    (step,) = steps_named(diverged, "generate while fenced")
    assert step.type == "NotServableError"
    assert "diverged" in step.text or "not published" in step.text


def test_a_successful_sync_lifts_the_fence(diverged: list[RankOutcome]) -> None:
    assert [step.outcome for step in steps_named(diverged, "equal again")] == ["ok", "ok"]


def test_unchanged_bytes_under_a_new_version_raise_the_stale_alarm_and_nothing_is_left(
    outcomes_of: Callable[..., list[RankOutcome]], engine: EngineProcess
) -> None:
    outcomes = outcomes_of("no_op_and_many", 1, [engine.address])
    assert steps_named(outcomes, "unchanged")[0].facts["since"] == [1]
    assert steps_named(outcomes, "changed")[0].facts["since"] == [None]
    assert steps_named(outcomes, "many")[0].outcome == "ok"
    assert steps_named(outcomes, "rings left")[0].facts["rings"] == []
