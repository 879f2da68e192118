"""Requirement marks read from the sources of tests, which imports and runs nothing of them.

Sees marks that stand above a function or a class, or in the `pytestmark` of a class or module. Marks that
only a collection can see (of single cases, of a `conftest.py`) are passed over, so that a line counts as
shown here only where it does there.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from requirement_listing import TOLD, Line, Proof

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from requirement_list import Requirement


def lines_of_sources(folder: Path, known: Mapping[str, Requirement]) -> dict[str, Line]:
    """Every known requirement by its id, with the tests below `folder` that carry its mark."""
    lines = {name: Line(requirement) for name, requirement in known.items()}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "requirement(" in text:
            for name, proof in proofs_of(text, str(path.relative_to(folder))):
                lines[name].proofs.append(proof)
    return lines


def proofs_of(source: str, title: str) -> Iterator[tuple[str, Proof]]:
    """Ids of requirements, each with a test of this source that is marked with it."""
    yield from _proofs(ast.parse(source).body, title, [])


def _proofs(body: list[ast.stmt], title: str, above: list[ast.expr]) -> Iterator[tuple[str, Proof]]:
    outer = [*above, *(mark for statement in body for mark in _listed_marks(statement))]
    for item in body:
        if isinstance(item, ast.ClassDef) and item.name.startswith("Test"):
            yield from _proofs(item.body, f"{title}::{item.name}", [*outer, *item.decorator_list])
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_"):
            marks = [*outer, *item.decorator_list]
            told = tuple(name for name in TOLD if any(_name_of(mark) == name for mark in marks))
            for mark in marks:
                if isinstance(mark, ast.Call) and _name_of(mark) == "requirement":
                    part = next((ast.literal_eval(word.value) for word in mark.keywords), "")
                    name = ast.literal_eval(mark.args[0])
                    yield name, Proof(f"{title}::{item.name}", part, told, 1)


def _listed_marks(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
        listed = isinstance(statement.value, ast.List | ast.Tuple)
        return statement.value.elts if listed else [statement.value]
    return []


def _name_of(mark: ast.expr) -> str:
    """`live` of `pytest.mark.live`, with or without arguments."""
    name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
    return name.removeprefix("pytest.mark.") if name.startswith("pytest.mark.") else ""
