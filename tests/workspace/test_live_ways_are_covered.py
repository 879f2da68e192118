"""Live tests of vLLM say that they show every pair in every run and every way in long runs; `WAYS.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "live/vllm/ways"))
import live_ways
from collected_ways import LONG, TABLE, collected

if TYPE_CHECKING:
    from live_ways import Way


@pytest.fixture(scope="module")
def every_run() -> dict[Way, list[str]]:
    return collected()


@pytest.fixture(scope="module")
def long_run() -> dict[Way, list[str]]:
    return collected(LONG)


def test_every_run_shows_each_pair(every_run: dict[Way, list[str]]) -> None:
    assert live_ways.missing_pairs(every_run) == []


def test_the_older_version_is_shown_in_every_run_with_base_and_adapter(
    every_run: dict[Way, list[str]],
) -> None:
    older = {way.mode for way in every_run if way.version == live_ways.OLDER}
    assert older >= set(live_ways.OLDER_IN_EVERY_RUN)


def test_long_runs_show_every_way(every_run: dict[Way, list[str]], long_run: dict[Way, list[str]]) -> None:
    assert sorted(set(live_ways.every_way()) - set(long_run)) == []
    assert set(every_run) <= set(long_run)


def test_the_table_is_what_the_marks_say(
    every_run: dict[Way, list[str]], long_run: dict[Way, list[str]]
) -> None:
    assert TABLE.read_text() == live_ways.table(every_run, long_run), "run write_table.py beside live_ways.py"


def test_a_pair_that_no_test_shows_is_told(every_run: dict[Way, list[str]]) -> None:
    """The control: without what AsyncLLM has of mode merged, that very pair is missing."""
    left = [way for way in every_run if (way.place, way.mode) != ("AsyncLLM", "merged")]
    assert live_ways.missing_pairs(left) == ["place AsyncLLM, mode merged"]
