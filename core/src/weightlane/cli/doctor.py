"""`weightlane doctor`: what is installed, what each plugin chose and on which evidence, what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightlane.cli import FAILED, WELL
from weightlane.cli.diagnosis import Diagnosis, diagnose
from weightlane.cli.locked import Locked
from weightlane.cli.output import print_json, print_line, print_lines
from weightlane.cli.survey import PluginRow, survey

if TYPE_CHECKING:
    from weightlane.cli.engine_rows import EngineRow

_INDENT = 15
_LABELS = {
    "usable": "usable",
    "assumed": "assumed",
    "not-installed": "not here",
    "no-plugin": "no plugin",
    "absent": "not here",
    "blocked": "blocked",
    "problem": "problem",
}

app = typer.Typer(add_completion=False)


@app.command("doctor")
def doctor(
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE]...", help="Engines that must be usable here, such as vllm."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    locked: Locked = None,
) -> None:
    """Tell what is installed, what was chosen and on which evidence, and what is missing.

    Exit status 0: all is well. An engine that is not installed or that no plugin serves is no fault unless it
    is named here, nor is a disabled plugin. Exit status 1: a plugin is broken, incompatible or in conflict,
    no backend fits an installed engine, a pin or a lock is not met, or an ENGINE named here cannot be used.
    Exit status 2: wrong usage, or the command itself broke.
    """
    found = diagnose(survey(locked), engines or [])
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(FAILED if found.problems else WELL)


def _print(found: Diagnosis) -> None:
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in found.packages.items())
    print_line(f"weightlane {found.weightlane} on Python {found.python} with {packages}")
    print_line("\nPlugins")
    for plugin in found.plugins:
        _print_plugin(plugin)
    if not found.plugins:
        print_line("  none: no distribution here has an entry point of group weightlane")
    print_line("\nEngines")
    for row in found.engines:
        _print_engine(row)
    if found.remarks:
        print_line("")
        print_lines(found.remarks, 0)
    if not found.problems:
        print_line("\nAll is well.")
        return
    print_line(f"\n{len(found.problems)} problem{'' if len(found.problems) == 1 else 's'}")
    for problem in found.problems:
        print_line(f"  {problem.subject}: {problem.what}")
        print_lines([problem.fix], 4)


def _print_plugin(plugin: PluginRow) -> None:
    detail = f": {plugin.error}" if plugin.error else ""
    print_line(f"  {plugin.state:<13}{plugin.name} of {plugin.distribution} {plugin.version}{detail}")
    print_lines([plugin.fix] if plugin.fix else [], _INDENT)


def _print_engine(row: EngineRow) -> None:
    label = _LABELS[row.state]
    name = f"{row.engine} {row.version}".rstrip() + (f" ({row.role})" if row.role else "")
    if row.state == "problem":
        print_line(f"  {label:<13}{name}; see below")
    elif row.backend:
        print_line(f"  {label:<13}{name}: {row.backend}")
        print_lines([row.says] if row.state == "assumed" else [], _INDENT)
        print_lines([*row.evidence, *(f"note: {note}" for note in row.notes)], _INDENT)
    elif row.state in {"no-plugin", "absent"}:
        print_line(f"  {label:<13}{name}: {row.command}")
        print_lines([row.says], _INDENT)
    else:
        print_line(f"  {label:<13}{name}: {row.says}")
        print_lines([row.fix], _INDENT)
