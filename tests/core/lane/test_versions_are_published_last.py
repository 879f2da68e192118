"""Publishing comes after everything else, and a commit that fails half way says which replicas serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import EngineProcess

    from weightlane.testing.ranks import RankGroup, RankOutcome


@pytest.mark.requirement("R82")
@pytest.mark.requirement("R68", part="full weights")
def test_a_call_that_fails_after_the_last_bucket_publishes_nothing(
    outcomes_of: Callable[..., list[RankOutcome]], engine: EngineProcess
) -> None:
    outcomes = outcomes_of("failed_settle", 2, [engine.address])
    steps = steps_named(outcomes, "settle")
    assert [step.outcome for step in steps] == ["error", "error"]
    for step in steps:
        assert "flush_cache_that_fails" in step.text
        assert "was not published" in step.text
    assert steps_named(outcomes, "published")[0].facts["version"] == [None]
    (generated,) = steps_named(outcomes, "generate")
    assert generated.type == "NotServableError"


def test_a_replica_lost_in_the_commit_leaves_the_other_named_as_serving(
    ranks: Callable[..., RankGroup],
    engine: EngineProcess,
    start_engine: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    second = start_engine()
    go = tmp_path / "go"
    with ranks("half_published", 2, [engine.address, second.address], go=str(go)) as group:
        group.wait_for_output(0, "PUBLISHED THE FIRST", 60)
        second.kill()
        go.touch()
        outcomes = group.wait(60)
    steps = steps_named(outcomes, "commit")
    assert [step.type for step in steps] == ["EngineDeadError", "EngineDeadError"]
    for step in steps:
        assert second.address in step.text
        assert f"Version 1 is served by {engine.address}." in step.text
        assert "replicas that had not published are fenced" in step.text
    assert steps_named(outcomes, "served")[0].facts["versions"] == [1]
    assert steps_named(outcomes, "published")[0].facts["version"] == [None]
