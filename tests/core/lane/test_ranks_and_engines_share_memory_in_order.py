"""Two ranks and two engine processes: who waits for whom around a sync, and one verdict on sleep and wake."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.testing.ranks import RankGroup, RankOutcome
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import EngineProcess

    from weightlane.testing.steps import Step

PROGRAM = Path(__file__).with_name("sleep_program.py")
BOTH = {"0": ["weights", "kv_cache"], "1": ["weights", "kv_cache"]}
NOTHING: dict[str, list[str]] = {"0": [], "1": []}


@pytest.fixture(scope="module")
def ran(start_engine: Callable[..., EngineProcess], model_folder: Path) -> list[RankOutcome]:
    pair = [start_engine(), start_engine()]
    environment = {
        "LANE_TEST_MODEL": str(model_folder),
        "LANE_TEST_URLS": ",".join(engine.address for engine in pair),
        "LANE_TEST_SECOND_ENGINE": str(pair[1].process_id),
    }
    with RankGroup([str(PROGRAM)], 2, environment) as group:
        outcomes = group.wait(100.0)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes


def times(ran: list[RankOutcome], name: str) -> list[dict[str, list[int]]]:
    """What each rank noted, in rank order; the engines' calls are rank 0's."""
    return [step.facts for step in steps_named(ran, name)]  # type: ignore[misc]


def facts(ran: list[RankOutcome], name: str) -> object:
    (step,) = steps_named(ran, name)
    return step.facts


def both_fail_alike(ran: list[RankOutcome], name: str) -> Step:
    first, second = steps_named(ran, name)
    assert (first.rank, second.rank, first.outcome) == (0, 1, "error")
    assert (first.type, first.text) == (second.type, second.text)
    return first


def versions(ran: list[RankOutcome], name: str) -> list[object]:
    return [step.facts["version"] for step in steps_named(ran, f"{name}: version")]


def test_no_rank_moves_before_all_have_loaded_and_no_engine_takes_back_before_all_are_through(
    ran: list[RankOutcome],
) -> None:
    assert [step.outcome for step in steps_named(ran, "as planned")] == ["ok", "ok"]
    noted = times(ran, "times as planned")
    assert [len(rank["bucket"]) > 1 for rank in noted] == [True, True]
    assert [len(noted[0][route]) for route in ("release_kv_cache", "resume_kv_cache")] == [2, 2]
    assert max(noted[0]["release_kv_cache"]) < min(rank["onload begins"][0] for rank in noted)
    assert max(rank["onload ends"][0] for rank in noted) < min(rank["bucket"][0] for rank in noted)
    assert max(rank["offload ends"][0] for rank in noted) < min(noted[0]["resume_kv_cache"])


def test_without_the_rule_the_times_above_would_show_it(ran: list[RankOutcome]) -> None:
    noted = times(ran, "times in no order")
    assert noted[0]["bucket"][0] < noted[1]["onload ends"][0]
    assert min(noted[0]["resume_kv_cache"]) < noted[1]["offload ends"][0]


@pytest.mark.requirement("R78")
def test_sleep_releases_at_both_engines_and_the_next_sync_takes_back(ran: list[RankOutcome]) -> None:
    assert [step.outcome for step in steps_named(ran, "sleep")] == ["ok", "ok"]
    assert facts(ran, "asleep") == BOTH
    assert [step.type for step in steps_named(ran, "generate asleep")] == ["NotServableError"] * 2
    assert [step.outcome for step in steps_named(ran, "sync wakes")] == ["ok", "ok"]
    assert facts(ran, "after the sync") == NOTHING
    assert versions(ran, "generate awake") == [[3], [3]]


def test_a_sleep_that_fails_at_one_engine_is_one_error_on_all_ranks_and_the_other_sleeps(
    ran: list[RankOutcome],
) -> None:
    failed = both_fail_alike(ran, "failing sleep")
    assert failed.type == "EngineError"
    assert "kv_cache cannot be released: it is released already" in failed.text
    assert facts(ran, "after the failing sleep") == BOTH


def test_a_wake_that_fails_is_one_error_too_and_the_next_sync_heals(ran: list[RankOutcome]) -> None:
    failed = both_fail_alike(ran, "failing wake")
    assert failed.type == "EngineError"
    assert "kv_cache cannot be resumed: it is not released" in failed.text
    assert facts(ran, "after the failing wake") == NOTHING
    assert [step.outcome for step in steps_named(ran, "healed")] == ["ok", "ok"]
    assert versions(ran, "generate healed") == [[4], [4]]


def test_an_engine_that_hangs_in_its_release_is_one_error_on_all_ranks(ran: list[RankOutcome]) -> None:
    failed = both_fail_alike(ran, "hanging sleep")
    assert failed.type == "SyncTimeoutError"
    assert "release_weights" in failed.text
    assert [step.outcome for step in steps_named(ran, "at the end")] == ["ok", "ok"]
    assert versions(ran, "generate at the end") == [[5], [5]]
