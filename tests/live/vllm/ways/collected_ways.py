"""Asks pytest which live tests it would run, and for their ways; no engine is needed for that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_ways import OLDER, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "WAYS.md"
LONG = 10


def collected(syncs: int | None = None) -> dict[Way, list[str]]:
    """The tests that show each way, with `--syncs` or as every run has it.

    Raises:
        RuntimeError: pytest could not collect them; what it said is on stdout.
    """
    # In this process: the tests import torch, which whoever asks has likely imported.
    words = [str(TESTS), "-m", "live", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    words += [] if syncs is None else [f"--syncs={syncs}"]
    listing = _Listing()
    if pytest.main(words, plugins=[listing]) is not pytest.ExitCode.OK:
        raise RuntimeError(f"pytest could not collect {TESTS}")
    return listing.found


class _Listing:
    """A plugin that keeps what is left of the collection when everybody has deselected."""

    def __init__(self) -> None:
        self.found: dict[Way, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for way in _ways(item):
                self.found.setdefault(way, []).append(item.nodeid)


def _ways(item: pytest.Item) -> Iterator[Way]:
    """A test that is given the older version's number shows its ways there."""
    callspec = getattr(item, "callspec", None)
    older = callspec is not None and OLDER in callspec.params.values()
    for mark in item.iter_markers("way"):
        way: Way = mark.args[0]
        yield dataclasses.replace(way, version=OLDER) if older else way
