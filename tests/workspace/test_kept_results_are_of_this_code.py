"""What `nox -s matrix` showed is kept, and is of the code that there is: else it says how to renew it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "matrix"))
import shown_modules

MODULE = shown_modules.SHOWN_BY_THE_MATRIX[0]


@pytest.fixture(scope="module")
def kept(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / shown_modules.RESULT).read_text())
    return found


def test_the_result_is_of_the_modules_that_it_shows(root: Path, kept: dict[str, Any]) -> None:
    stale = shown_modules.stale(kept["modules"], root)
    assert not stale, (
        f"{shown_modules.RESULT} was made with other code than {', '.join(stale)} holds now: run "
        f"`{shown_modules.RENEWED_BY}` and commit what it writes"
    )


def test_a_module_that_sends_something_else_makes_it_stale(root: Path, kept: dict[str, Any]) -> None:
    """The control, by a digest of before such a change; a module that came or went is told as well."""
    assert shown_modules.stale({**kept["modules"], MODULE: "0" * 16}, root) == [MODULE]
    gone = {name: digest for name, digest in kept["modules"].items() if name != MODULE}
    assert shown_modules.stale({**gone, "of/old.py": "1"}, root) == ["of/old.py", MODULE]


def test_only_what_a_server_could_notice_changes_a_digest() -> None:
    source = 'def f(x):\n    """Adds."""\n    return x + 1\n\nNAME = "a"\n"""A name."""\nWHY = "It is so."\n'
    same = '"""A module."""\n\ndef f(x):  # adds\n    return (x + 1)\n\n\nNAME = "a"\nWHY = "Or not."\n'
    assert shown_modules.code_digest(source) == shown_modules.code_digest(same)
    for other in (source.replace("+ 1", "+ 2"), source.replace('"a"', '"b"'), source.replace("f(x", "g(x")):
        assert shown_modules.code_digest(source) != shown_modules.code_digest(other)


def test_every_listed_version_is_in_the_result_as_whole_as_it_was_asked(
    root: Path, kept: dict[str, Any]
) -> None:
    listed = json.loads((root / "tests/live/sglang_cpu_environment/other_versions.json").read_text())
    assert set(kept["versions"]) == set(listed)
    for version, asked in listed.items():
        found = kept["versions"][version]
        assert found["requests"], version
        assert bool(found["live"]) == found["restart_noticed"] == asked["live"], version
        for way in found["live"]:
            assert way["syncs"] >= 3
            assert way["largest_difference"] <= 1e-4
            assert way["smallest_move"] >= 1e-2
