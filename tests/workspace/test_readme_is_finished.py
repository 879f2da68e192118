"""The README is what a newcomer meets first: whole, and with the two commands where `.ci/run` finds them."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_no_placeholder_is_left_in_it() -> None:
    assert re.findall(r"\b[A-Z]+_(?:OUTPUT|SECONDS)\b|\bTODO\b", README) == []


def test_the_two_commands_follow_the_marker() -> None:
    block = README.split("<!-- the two commands -->\n```\n")[1].split("```")[0]
    assert block.split("\n") == ["make demo", "make test", ""]


def test_every_file_that_it_names_exists() -> None:
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`((?:core|plugins|tests|examples|benchmarks|\.ci)(?:/[\w.-]+)+)`", README))
    assert named, "it names no file at all"
    assert {name for name in named if not (root / name).exists()} == set()
