"""`explain` and `diff` in the README are what these commands print, from the snapshots that are there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

import weightlane.registry
from weightlane.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def shown(readme: str, command: str) -> tuple[list[str], list[str]]:
    """The words of the first such command that the README shows, and the lines that follow it."""
    block = next(part for part in readme.split("```") if f"weightlane {command} " in part and "\n$ " in part)
    line, *lines = block.split("\n$ ", 1)[1].rstrip().split("\n")
    return shlex.split(line), lines


@pytest.mark.parametrize("command", ["explain", "diff"])
def test_its_lines_are_the_commands_own(
    docs: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, lines = shown((docs.parent / "README.md").read_text(), command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)
    capsys.readouterr()
    main(words[1:])
    printed = capsys.readouterr().out.split("\n")
    assert len(lines) > 4
    assert [line for line in lines if line != "…" and line not in printed] == []
