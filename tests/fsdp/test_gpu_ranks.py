"""Two ranks with a GPU each: gathered over NCCL, bit for bit what the unsharded model has."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_gpus.py")


@pytest.mark.gpu
@pytest.mark.timeout(290)
def test_two_gpus_export_what_the_unsharded_model_has(tmp_path: Path) -> None:
    from case_outcomes import outcomes_of

    outcomes = outcomes_of(PROGRAM, 2, tmp_path)
    cases = list(outcomes.by_rank[0])
    assert len(cases) > 40
    for case in cases:
        outcomes.require(case)
