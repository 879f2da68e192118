"""Which modules a kept result of `nox -s matrix` shows, and what of them it is tied to.

They are those that make the bytes that a server of SGLang is sent, and those that read what it tells; not the
launch, the lane or the trace, which other sessions run in every CI. A digest is of what a server could notice
of a module: comments, docstrings, layout and sentences for people (texts with a space in them, as no route,
field or name has) change none.
"""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

RENEWED_BY = "nox -s matrix"
RESULT = "benchmarks/results/sglang_versions.json"
_SGLANG = "plugins/sglang/src/weightlane_sglang"
SHOWN_BY_THE_MATRIX = tuple(
    f"{_SGLANG}/{name}.py"
    for name in (
        "adapter_contract",
        "adapter_held",
        "adapter_program",
        "contract",
        "generation",
        "lifecycle",
        "payload",
        "probes",
        "requests",
        "session_program",
        "spelling",
        "unread_replies",
        "untimed_flush",
    )
)


def digests(modules: Iterable[str], root: Path) -> dict[str, str]:
    """By path below `root`: sixteen hex digits of what each module does."""
    return {module: code_digest((root / module).read_text(encoding="utf-8")) for module in modules}


def code_digest(source: str) -> str:
    """The same for sources that differ in comments, docstrings, layout and sentences alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            # Strings that stand alone: docstrings, and what is said below a constant.
            node.body = [item for item in node.body if not _is_said(item)] or [ast.Pass()]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = " "
    return hashlib.sha256(_told(tree).encode()).hexdigest()[:16]


def _told(value: object) -> str:
    """A tree in words, the same under every Python: `ast.dump` tells empty fields that only some have."""
    if isinstance(value, list):
        return f"[{','.join(map(_told, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = (f"{name}={_told(held)}" for name, held in ast.iter_fields(value) if held not in (None, []))
    return f"{type(value).__name__}({','.join(fields)})"


def _is_said(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def stale(kept: Mapping[str, str], root: Path) -> list[str]:
    """Modules that are others than when the result was made; also those that came or went."""
    now = digests(SHOWN_BY_THE_MATRIX, root)
    return sorted(name for name in {*kept, *now} if kept.get(name) != now.get(name))
