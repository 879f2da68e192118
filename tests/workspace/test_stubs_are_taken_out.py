"""A stub in `sys.modules` that outlived its test would be what a later test imports."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

CHANGES = frozenset({"update", "setdefault", "__setitem__"})


def is_modules(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "modules" and ast.unparse(node.value) == "sys"


def stubs_put_by_hand(source: str) -> list[int]:
    """Lines that put a module into `sys.modules` without `monkeypatch`, which always takes it out again."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            put = any(
                is_modules(t) or (isinstance(t, ast.Subscript) and is_modules(t.value)) for t in targets
            )
        else:
            function = node.func if isinstance(node, ast.Call) else None
            put = (
                isinstance(function, ast.Attribute)
                and function.attr in CHANGES
                and is_modules(function.value)
            )
        if put:
            found.append(node.lineno)
    return found


@pytest.mark.requirement("R74")
def test_every_stub_is_put_in_place_by_monkeypatch(root: Path) -> None:
    files = sorted((root / "tests").rglob("*.py"))
    assert len(files) > 50
    assert {str(file): lines for file in files if (lines := stubs_put_by_hand(file.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    ["sys.modules['vllm'] = fake", "sys.modules.update(fakes)", "sys.modules |= fakes", "sys.modules = {}"],
)
def test_the_check_sees_one_put_by_hand(line: str) -> None:
    assert stubs_put_by_hand(f"import sys\n{line}\n") == [2]


def test_the_check_lets_monkeypatch_be() -> None:
    assert (
        stubs_put_by_hand("monkeypatch.setitem(sys.modules, 'vllm', fake)\nx = sys.modules['vllm']\n") == []
    )
