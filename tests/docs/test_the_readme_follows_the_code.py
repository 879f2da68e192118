"""The README states version ranges by hand, for readers who have nothing installed: the descriptors' own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import ModuleType

HEAD = "| rollout engine | reached by | started with |"


@pytest.fixture(scope="session")
def readme(docs: Path) -> str:
    return (docs.parent / "README.md").read_text()


@pytest.fixture
def declared(script: Callable[[str], ModuleType]) -> dict[str, list[SpecifierSet]]:
    """The ranges of every era of every engine, from the installed descriptors."""
    matrix = script("support_matrix")
    ranges: dict[str, list[SpecifierSet]] = {}
    for row in matrix.matrix_rows(matrix.installed_registry()):
        ranges.setdefault(row.engine, []).append(SpecifierSet(row.versions))
    return ranges


def first_cells(readme: str) -> dict[str, str]:
    """The first cell of each row of the engine table, by the engine that it names."""
    rows = readme.partition(f"{HEAD}\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [row.split("|")[1].strip() for row in rows]
    return {cell.split("`")[1]: cell for cell in cells}


def stated(cell: str) -> tuple[str, str] | None:
    """First and last version of `` `engine` 0.28 to 0.32 ``; None where none is stated."""
    found = re.search(r" (\d[\d.]*) to (\d[\d.]*)$", cell)
    return (found[1], found[2]) if found else None


def ends(ranges: Iterable[SpecifierSet]) -> tuple[Version, Version]:
    """The first version that any of the ranges takes, and the first that none takes any more."""
    bounds = [item for versions in ranges for item in versions]
    return (
        min(Version(item.version) for item in bounds if item.operator == ">="),
        max(Version(item.version) for item in bounds if item.operator == "<"),
    )


def after(version: str) -> Version:
    """The next version of as many parts: 0.33 after 0.32."""
    *head, last = version.split(".")
    return Version(".".join([*head, str(int(last) + 1)]))


def differing(cells: dict[str, str], declared: dict[str, list[SpecifierSet]]) -> set[str]:
    wrong: set[str] = set()
    for engine, cell in cells.items():
        versions = stated(cell)
        if versions and (Version(versions[0]), after(versions[1])) != ends(declared[engine]):
            wrong.add(engine)
    return wrong


def test_the_ranges_of_the_engine_table_are_those_of_the_descriptors(
    readme: str, declared: dict[str, list[SpecifierSet]]
) -> None:
    cells = first_cells(readme)
    assert set(cells) == {"vllm", "sglang", "reference"}
    assert {engine for engine, cell in cells.items() if stated(cell)} == {"vllm", "sglang"}
    assert differing(cells, declared) == set()


@pytest.mark.parametrize("cell", ["`fake` 1.1 to 1.4", "`fake` 1.2 to 1.3", "`fake` 1.2 to 1.5"])
def test_a_range_that_begins_or_ends_elsewhere_is_seen(cell: str) -> None:
    eras = {"fake": [SpecifierSet(">=1.3,<1.5"), SpecifierSet(">=1.2,<1.3")]}
    assert differing({"fake": "`fake` 1.2 to 1.4"}, eras) == set()
    assert differing({"fake": cell}, eras) == {"fake"}


def test_the_listing_of_backends_shows_ranges_as_they_are(
    readme: str, declared: dict[str, list[SpecifierSet]]
) -> None:
    listing = readme.partition("$ weightlane backends\n")[2].partition("\n\n")[0].splitlines()
    assert listing[0].split()[2:5] == ["ENGINE", "ERA", "VERSIONS"]
    shown = [(line.split()[2], SpecifierSet(line.split()[4])) for line in listing[1:]]
    assert {engine for engine, _ in shown} == set(declared)
    assert [engine for engine, versions in shown if versions not in declared[engine]] == []
