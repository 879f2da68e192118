"""`weightlane doctor`: what is installed, what each plugin chose and on which evidence, what is missing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import msgspec
import typer

from weightlane import __version__
from weightlane.catalogue import install_command
from weightlane.cli.output import print_json, print_line, print_lines
from weightlane.cli.survey import EngineRow, PluginRow, Survey, survey
from weightlane.errors import near_names

PACKAGES = ("torch", "transformers", "peft", "safetensors", "pluggy", "msgspec")

app = typer.Typer(add_completion=False)


class Finding(msgspec.Struct, frozen=True):
    """Something asked for that is missing or broken, and the command or step that mends it."""

    subject: str
    what: str
    fix: str


class Diagnosis(msgspec.Struct, frozen=True):
    """What `doctor` found. `problems` empty means exit status 0."""

    weightlane: str
    python: str
    packages: dict[str, str | None]
    plugins: tuple[PluginRow, ...]
    engines: tuple[EngineRow, ...]
    problems: tuple[Finding, ...]


@app.command("doctor")
def doctor(
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE]...", help="Engines that must be usable here, such as vllm."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Tell what is installed, what was chosen and on which evidence, and what is missing.

    Exit status 1 if a plugin is broken, an installed engine is not served, a pin is not met, or an ENGINE
    named here cannot be used.
    """
    found = diagnose(survey(), engines or [])
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(1 if found.problems else 0)


def diagnose(found: Survey, wanted: list[str]) -> Diagnosis:
    """Judges a survey; `wanted` are engines that must be usable here."""
    problems = [
        Finding(f"plugin {row.name}", f"{row.sentence}.", _mend(row))
        for row in found.plugins
        if row.state not in {"active", "disabled"}
    ]
    problems += [Finding(row.engine, row.problem, row.fix) for row in found.engines if row.problem]
    for engine in dict.fromkeys(wanted):
        problems += _asked_for(engine, found.engines)
    return Diagnosis(
        weightlane=__version__,
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        plugins=found.plugins,
        engines=found.engines,
        problems=tuple(problems),
    )


def _asked_for(engine: str, rows: tuple[EngineRow, ...]) -> list[Finding]:
    own = [row for row in rows if row.engine == engine]
    if any(row.backend or row.problem for row in own):
        return []  # usable, or reported already
    if not own:
        near = near_names(engine, {row.engine for row in rows})
        hint = f"; near: {', '.join(near)}" if near else ""
        what = f"No plugin registers {engine}{hint}."
        return [Finding(engine, what, "Install a distribution that registers a backend for it.")]
    what = "is installed, but no plugin here serves it." if own[0].version else "is not installed here."
    if not own[0].version and not own[0].role:
        what = "is not installed here, and no plugin here serves it."
    return [Finding(engine, f"{engine} {what}", f"Run {own[0].fix or install_command(engine)}.")]


def _mend(row: PluginRow) -> str:
    if row.state == "conflict":
        return f"Run pip uninstall {row.distribution}, or pin the one you want."
    return f"Run pip install -U weightlane {row.distribution}, or pip uninstall {row.distribution}."


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _print(found: Diagnosis) -> None:
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in found.packages.items())
    print_line(f"weightlane {found.weightlane} on Python {found.python} with {packages}")
    print_line("\nPlugins")
    for plugin in found.plugins:
        detail = f": {plugin.error}" if plugin.error else ""
        print_line(f"  {plugin.state:<13}{plugin.name} of {plugin.distribution} {plugin.version}{detail}")
    if not found.plugins:
        print_line("  none: no distribution here has an entry point of group weightlane")
    print_line("\nEngines")
    for row in found.engines:
        _print_engine(row)
    if not found.problems:
        print_line("\nAll is well.")
        return
    print_line(f"\n{len(found.problems)} problem{'' if len(found.problems) == 1 else 's'}")
    for problem in found.problems:
        print_line(f"  {problem.subject}: {problem.what}")
        print_lines([problem.fix], 4)


def _print_engine(row: EngineRow) -> None:
    name = f"{row.engine} {row.version}".rstrip() + (f" ({row.role})" if row.role else "")
    if row.problem:
        print_line(f"  {'problem':<13}{name}; see below")
    elif row.backend:
        print_line(f"  {'chosen':<13}{name}: {row.backend}")
        print_lines([*row.evidence, *(f"note: {note}" for note in row.notes)], 17)
    elif row.version:
        print_line(f"  {'not served':<13}{name}: {row.fix}")
    elif row.role:
        print_line(f"  {'not here':<13}{name}, needed only where the engine runs: {row.fix}")
    else:
        print_line(f"  {'no plugin':<13}{name}: {row.fix}")
