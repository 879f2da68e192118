#!/usr/bin/env python3
"""Writes reStructuredText from data: tables, and text that must be shown exactly as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def literal(text: str) -> str:
    """Inline code; "" stays empty, since reStructuredText has no empty literal."""
    return f"``{text}``" if text else ""


def list_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, widths: str = "auto", css_class: str = "docutils"
) -> str:
    """A table with one header row; cells are reStructuredText and may have several lines."""
    options = ["   :header-rows: 1", f"   :widths: {widths}", f"   :class: {css_class}"]
    lines = [".. list-table::", *options, ""]
    for row in (head, *rows):
        for number, cell in enumerate(row):
            bullet = "   * - " if number == 0 else "     - "
            first, *more = cell.splitlines() or [""]
            lines.append(f"{bullet}{first}".rstrip())
            lines += [f"       {line}".rstrip() for line in more]
    return "\n".join(lines) + "\n"
