"""One run of scenario `bad_input` on two ranks; each test reads one of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import EngineProcess

    from weightlane.testing.ranks import RankOutcome


@pytest.fixture(scope="module")
def outcomes(outcomes_of: Callable[..., list[RankOutcome]], engine: EngineProcess) -> list[RankOutcome]:
    return outcomes_of("bad_input", 2, [engine.address])


def same_error(outcomes: list[RankOutcome], name: str, kind: str) -> str:
    """The text of a step's error, which both ranks must have raised alike."""
    first, second = steps_named(outcomes, name)
    assert (first.outcome, second.outcome) == ("error", "error")
    assert (first.type, second.type) == (kind, kind)
    assert first.text == second.text
    assert max(first.seconds, second.seconds) < 30
    return first.text


def test_a_tensor_that_one_rank_alone_has_is_one_plan_error(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "tensor on one rank only", "PlanError")
    assert "model.extra.weight" in text
    assert "held by rank 1 but not by rank 0" in text


def test_all_problems_come_in_one_error_with_near_names(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "several at once", "PlanError")
    lines = text.splitlines()
    missing = next(line for line in lines if line.startswith("[missing-name]"))
    assert "model.layers.1.mlp.up_proj.weight" in missing
    assert "Near: model.layers.1.mlp.upp_proj.weight" in missing
    extra = next(line for line in lines if line.startswith("[extra-name]"))
    assert "model.layers.1.mlp.upp_proj.weight" in extra
    shape = next(line for line in lines if line.startswith("[shape]"))
    assert "model.norm.weight" in shape
    assert "[3]" in shape
    assert "[64]" in shape
    dtype = next(line for line in lines if line.startswith("[dtype]"))
    assert "lm_head.weight" in dtype
    assert "int32" in dtype
    assert len(lines) == 4


def test_ranks_that_hold_different_dtypes_are_told_apart(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "dtype differs between ranks", "PlanError")
    assert "rank 1 holds float16" in text
    assert "rank 0 holds float32" in text


def test_what_rank_1_cannot_export_is_rank_0s_error_too(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "not a tensor on rank 1", "ExportError")
    assert "a str" in text


def test_an_unknown_engine_names_near_ones(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "no such engine", "SelectionError")
    assert "refference" in text
    assert "reference" in text


def test_a_mode_that_no_backend_has_is_refused_by_name(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "mode nobody has", "ExportError")
    assert "adapter" in text


def test_ranks_under_different_locks_are_told_apart(outcomes: list[RankOutcome]) -> None:
    text = same_error(outcomes, "locks that differ", "PlanError")
    assert "rank 1 was given locked=lock " in text


def test_a_lock_that_rank_1_cannot_read_is_rank_0s_error_too(outcomes: list[RankOutcome]) -> None:
    assert "rank-2.lock cannot be opened" in same_error(outcomes, "a lock that is not there", "LockError")


def test_nothing_of_all_that_touched_the_receiver(outcomes: list[RankOutcome]) -> None:
    (untouched,), (told,) = steps_named(outcomes, "untouched"), steps_named(outcomes, "before")
    assert len(told.facts["versions"]) == 1
    assert told.facts["versions"] == untouched.facts["versions"]


def test_ranks_that_ask_for_different_versions_both_fail_and_the_next_sync_works(
    outcomes: list[RankOutcome],
) -> None:
    text = same_error(outcomes, "different versions", "SyncError")
    assert "rank 0 version 10, rank 1 version 11" in text
    assert "it touched no receiver" in text
    assert [step.outcome for step in steps_named(outcomes, "good")] == ["ok", "ok"]
