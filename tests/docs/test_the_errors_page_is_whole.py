"""Whoever meets an error or a kind of problem finds it on the errors page, and nothing there is made up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import weightlane
from weightlane import errors

ROOT = Path(__file__).parents[2]
CORE = Path(weightlane.__file__).parent
# What an error from another process is made of again; its kinds come from a `Problem` on the far side.
PASSED_ON = CORE / "failures.py"


def kinds_in(source: str) -> set[str]:
    """The kind of every problem that this source makes; "" for one that is not written out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("Problem"):
            continue
        named = [item.value for item in node.keywords if item.arg == "kind"]
        kind = (node.args + named)[0] if node.args or named else None
        found.add(kind.value if isinstance(kind, ast.Constant) and isinstance(kind.value, str) else "")
    return found


def kinds_below(folder: Path) -> set[str]:
    return {kind for path in folder.rglob("*.py") if path != PASSED_ON for kind in kinds_in(path.read_text())}


@pytest.fixture(scope="session")
def page(docs: Path) -> str:
    return (docs / "errors.rst").read_text()


def section(page: str, title: str) -> str:
    return re.split(r"\n[^\n]+\n-{3,}\n", page.split(f"\n{title}\n---")[1])[0]


def kinds_told(page: str) -> set[str]:
    heads = re.findall(r"^   \* - (`.*)$", section(page, "Kinds of problems in a plan"), re.MULTILINE)
    return {kind for head in heads for kind in re.findall(r"`([a-z-]+)`", head)}


def test_every_kind_of_problem_of_core_is_in_the_table_and_no_other(page: str) -> None:
    assert kinds_told(page) == kinds_below(CORE)


def test_every_kind_that_our_plugins_add_is_told_below_it(page: str) -> None:
    added = kinds_below(ROOT / "plugins") - kinds_below(CORE)
    assert added
    below = section(page, "Kinds of problems in a plan").split("Plugins add kinds of their own")[1]
    assert {kind for kind in added if f"`{kind}`" not in below} == set()


def test_a_kind_that_is_not_in_the_table_would_be_seen(page: str) -> None:
    source = 'errors.Problem("mislaid", name)\nProblem(subject=name, kind="astray")\nProblem(kind, name)'
    assert kinds_in(source) == {"mislaid", "astray", ""}
    assert kinds_in(source).isdisjoint(kinds_told(page))


def test_every_error_is_in_the_table_of_what_to_do(page: str) -> None:
    told = set(re.findall(r"class:`~weightlane\.errors\.(\w+)`", section(page, "What to do")))
    base = errors.WeightlaneError
    every = {
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }
    assert told == every
