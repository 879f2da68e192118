"""A pytest plugin for `-p ways_listing`: writes the ways that the collected tests are marked with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from live_ways import OLDER, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ways-json", metavar="FILE", required=True, help="where to write them")


def pytest_collection_finish(session: pytest.Session) -> None:
    ways = [
        {"test": item.nodeid, "way": dataclasses.asdict(way)} for item in session.items for way in _ways(item)
    ]
    Path(session.config.getoption("--ways-json")).write_text(json.dumps(ways))


def _ways(item: pytest.Item) -> Iterator[Way]:
    """A test that is given the older version's number shows its ways there."""
    callspec = getattr(item, "callspec", None)
    older = callspec is not None and OLDER in callspec.params.values()
    for mark in item.iter_markers("way"):
        way: Way = mark.args[0]
        yield dataclasses.replace(way, version=OLDER) if older else way
