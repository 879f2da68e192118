"""The listing of `weightlane backends`. Imports no typer: see `weightlane.cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.cli.output import print_json, print_line, print_lines, print_table
from weightlane.cli.survey import BackendRow, survey

if TYPE_CHECKING:
    from pathlib import Path


def show_backends(*, as_json: bool, locked: Path | None = None) -> None:
    """Prints registered backends, which one is chosen for what is installed here, and on which evidence."""
    found = survey(locked)
    if as_json:
        print_json({"backends": found.backends, "plugins": found.plugins})
        return
    head = ("backend", "role", "engine", "era", "versions", "distribution", "state", "chosen")
    print_table(head, [_cells(row) for row in found.backends])
    print_line("")
    for row in found.backends:
        title = f"{row.name} ({row.era}) of {row.distribution} {row.version}"
        print_line(f"{title}: {'chosen' if row.chosen else 'not chosen'}")
        print_lines([*row.evidence, *(f"note: {note}" for note in row.notes)], 2)
        print_lines([row.reason] if row.reason else [], 2)
    unusable = [row for row in found.plugins if row.state != "active"]
    for plugin in unusable:
        print_line(f"plugin {plugin.sentence}")


def _cells(row: BackendRow) -> tuple[str, ...]:
    distribution = f"{row.distribution} {row.version}".rstrip()
    chosen = "yes" if row.chosen else "no"
    return (row.name, row.role, row.engine, row.era, row.versions, distribution, row.state, chosen)
