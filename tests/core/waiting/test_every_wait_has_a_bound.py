"""Every call of core that can block has a bound of its own, or a note beside it of what bounds it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import weightlane

SOURCES = Path(weightlane.__file__).parent
BOUNDLESS = {"join", "wait", "acquire", "result", "get", "communicate", "wait_for", "accept"}
"""Methods that block for ever when they are called without any argument."""
ASK_FOR_A_BOUND = {("subprocess", "run"), ("subprocess", "check_output"), ("subprocess", "check_call")}
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
COLLECTIVES = {"broadcast", "all_reduce", "all_gather", "barrier", "new_group", "TCPStore"}
NOTE = "bounded by"
LINES_ABOVE = 4


def blocking_lines(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of each call that has no bound in itself."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = (
            function.value.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
            else ""
        )
        bounds = {keyword.arg for keyword in node.keywords} & {"timeout", "seconds"}
        if (
            (
                isinstance(function, ast.Attribute)
                and name in BOUNDLESS
                and not node.args
                and not node.keywords
            )
            or ((owner, name) in ASK_FOR_A_BOUND and not bounds)
            or (owner == "threading" and name in LOCKS)
            or (name in COLLECTIVES and not bounds)
        ):
            found.append((node.lineno, f"{owner}.{name}" if owner else name))
    return found


def without_note(source: str) -> list[tuple[int, str]]:
    lines = source.splitlines()
    return [
        (line, name)
        for line, name in blocking_lines(ast.parse(source))
        if not any(NOTE in text.lower() for text in lines[max(0, line - 1 - LINES_ABOVE) : line])
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCES.rglob("*.py")) if not {"demo", "testing", "cli"} & set(path.parts)],
    ids=lambda path: str(path.relative_to(SOURCES)),
)
def test_a_wait_is_bounded_or_says_by_what(path: Path) -> None:
    assert without_note(path.read_text()) == []


def test_the_check_sees_every_kind_of_wait() -> None:
    source = """
        thread.join()
        event.wait()
        lock.acquire()
        subprocess.run(["true"])
        dist.broadcast(tensor, src=0)
        guard = threading.Lock()
        fine = ", ".join(names); event.wait(3.0); thread.join(timeout=1); subprocess.run(["true"], timeout=1)
        # Bounded by the thread's own loop.
        thread.join()
    """
    import textwrap

    named = [name for _, name in without_note(textwrap.dedent(source))]
    assert named == [
        "thread.join",
        "event.wait",
        "lock.acquire",
        "subprocess.run",
        "dist.broadcast",
        "threading.Lock",
    ]
