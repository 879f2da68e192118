"""Two ranks of an FSDP2 trainer and a reference engine: in step, and ended together when one rank fails.

Two of the runs are in mode full, two in mode merged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weightlane.testing.ranks import RankGroup, RankOutcome
from weightlane.testing.steps import steps_named

PROGRAM = Path(__file__).with_name("lane_ranks.py")
SECONDS = 30.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import even

    folder = tmp_path_factory.mktemp("fsdp-model")
    even().save_pretrained(folder)  # type: ignore[operator]
    return folder


def run(model_folder: Path, way_out: str) -> list[RankOutcome]:
    with RankGroup([str(PROGRAM), str(model_folder), way_out], 2) as group:
        if way_out != "stopped":
            return group.wait(110)
        # A stopped process never ends by itself: leaving the group kills it.
        group.wait_for_output(0, '"step":"after"', 110)
        with pytest.raises(TimeoutError):
            group.wait(1)
        return [RankOutcome(rank, 0, group.output(rank), 0.0) for rank in range(2)]


@pytest.mark.fsdp
@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("way_out", "told"),
    [
        ("killed", "ank 1 (process"),
        ("stopped", "ank 1 (process"),
        ("lost", "model.layers.1.mlp.up_proj.weight has a part of shape [0"),
        ("breaks", "no memory for "),
    ],
)
def test_a_rank_that_fails_ends_the_sync_of_all(model_folder: Path, way_out: str, told: str) -> None:
    outcomes = run(model_folder, way_out)
    for version in (1, 2):
        done = steps_named(outcomes, f"sync {version}")
        assert [step.outcome for step in done] == ["ok", "ok"], [outcome.output for outcome in outcomes]
        before, after = (
            float(str(value))
            for value in steps_named(outcomes, f"differences {version}")[0].facts["differences"]
        )
        assert before > 1e-2
        assert after < 1e-4
    left = steps_named(outcomes, "left")
    assert [step.rank for step in left] == ([0] if way_out in ("killed", "stopped") else [0, 1])
    for step in left:
        assert step.outcome == "error"
        assert told in step.text
        assert step.seconds < SECONDS
    assert len({step.text for step in left}) == 1
    assert all(step.outcome == "error" for step in steps_named(outcomes, "after")) or way_out == "lost"
