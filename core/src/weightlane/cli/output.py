"""Plain text and JSON for commands. Tables are aligned by hand: rich takes 0.1 s to import for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


def print_line(line: str) -> None:
    """One line on standard output."""
    sys.stdout.write(f"{line}\n")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print_line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content, two spaces apart; "" shows as a dash."""
    cells = [[*map(str.upper, head)], *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_lines(lines: Sequence[str], indent: int) -> None:
    """One line each, indented."""
    for line in lines:
        print_line(" " * indent + line)
