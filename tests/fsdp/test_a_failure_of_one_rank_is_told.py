"""A case that fails on one rank alone ends soon, and its test gives that rank's reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("one_rank_fails.py")


@pytest.mark.fsdp
def test_the_rank_that_failed_tells_why_and_the_one_that_waits_is_ended(tmp_path: Path) -> None:
    from case_outcomes import outcomes_of

    began = time.monotonic()
    outcomes = outcomes_of(PROGRAM, 2, tmp_path)
    assert time.monotonic() - began < 60
    outcomes.require("well")
    with pytest.raises(AssertionError, match="the reason, on rank 1") as caught:
        outcomes.require("apart")
    assert "rank 0: " in str(caught.value), "rank 0 came to no end of it"
    with pytest.raises(AssertionError, match="this case was not run"):
        outcomes.require("after")
