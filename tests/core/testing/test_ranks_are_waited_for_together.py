"""A rank that ends with an error ends the wait for the others, which may wait for it in a collective."""

from __future__ import annotations

import time

import pytest

from weightlane.testing.ranks import RankGroup

RANK_1_FAILS = """
import os, sys, time
print("here is", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(60)
"""


def test_others_are_killed_some_time_after_a_failure_and_all_outputs_are_kept() -> None:
    began = time.monotonic()
    with RankGroup(["-c", RANK_1_FAILS], 2) as group:
        outcomes = group.wait(50, after_a_failure=0.5)
    assert time.monotonic() - began < 30
    assert [outcome.status for outcome in outcomes] == [-9, 3]
    assert [outcome.output for outcome in outcomes] == ["here is 0\n", "here is 1\n"]


def test_without_that_bound_the_others_have_all_their_time_and_both_outputs_are_told() -> None:
    with (
        RankGroup(["-c", RANK_1_FAILS], 2) as group,
        pytest.raises(TimeoutError, match="rank 0 still") as caught,
    ):
        group.wait(2)
    assert "here is 0" in str(caught.value)
    assert "here is 1" in str(caught.value)


def test_ranks_that_all_end_well_are_not_cut_short() -> None:
    with RankGroup(["-c", "import os, time; time.sleep(0.3 * int(os.environ['RANK']))"], 2) as group:
        outcomes = group.wait(30, after_a_failure=0.0)
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert outcomes[0].seconds < outcomes[1].seconds
