"""What `weightlane doctor` finds: a survey judged, and the document that `--json` prints."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from weightlane import __version__
from weightlane.cli.engine_rows import EngineRow
from weightlane.cli.survey import PluginRow
from weightlane.errors import near_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.cli.survey import Survey

PACKAGES = ("torch", "transformers", "peft", "safetensors", "pluggy", "msgspec")
FORMAT = 1

_NO_ROLLOUT = (
    "No rollout engine can be started from this environment. A trainer rank or a controller needs none: they "
    "reach engines by address."
)
_USABLE = frozenset({"usable", "assumed"})


class Finding(msgspec.Struct, frozen=True):
    """Something asked for that is missing or broken; `fix` mends it, by `command` where one command does."""

    subject: str
    what: str
    fix: str
    command: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """The document of `weightlane doctor --json`.

    `format` rises when a field changes its meaning or goes; new fields may come at any time. `asked` are the
    engines named on the command line. `packages` maps names to versions, None for one that is not installed.
    `remarks` are worth knowing and nothing wrong. `problems` empty means exit status 0, which `status`
    repeats.
    """

    format: int
    status: int
    weightlane: str
    python: str
    asked: tuple[str, ...]
    packages: dict[str, str | None]
    plugins: tuple[PluginRow, ...]
    engines: tuple[EngineRow, ...]
    remarks: tuple[str, ...]
    problems: tuple[Finding, ...]


def diagnose(found: Survey, asked: Sequence[str]) -> Diagnosis:
    """Judges a survey; `asked` are engines that must be usable here."""
    problems = [
        Finding(f"plugin {row.name}", f"{row.sentence}.", row.fix, row.command)
        for row in found.plugins
        if row.state not in {"active", "disabled"}
    ]
    problems += [
        Finding(row.engine, row.problem, row.fix, row.command) for row in found.engines if row.problem
    ]
    for engine in dict.fromkeys(asked):
        problems += _asked_for(engine, found)
    return Diagnosis(
        format=FORMAT,
        status=1 if problems else 0,
        weightlane=__version__,
        python=platform.python_version(),
        asked=tuple(asked),
        packages={name: _version(name) for name in PACKAGES},
        plugins=found.plugins,
        engines=found.engines,
        remarks=_remarks(found),
        problems=tuple(problems),
    )


def _asked_for(engine: str, found: Survey) -> list[Finding]:
    rows = [row for row in found.engines if row.engine == engine]
    if any(row.state in _USABLE or row.problem for row in rows):
        return []  # usable, or reported already
    if not rows:
        return [_unknown(engine, found)]
    row = rows[0]
    words = {
        "not-installed": "is not installed here.",
        "no-plugin": "is installed, but no plugin here serves it.",
        "absent": "is not installed here, and no plugin here serves it.",
    }
    what = f"{engine} {words[row.state]}" if row.state in words else f"{engine} cannot be used. {row.says}"
    return [Finding(engine, what, f"Run {row.command}." if row.command else row.fix, row.command)]


def _unknown(engine: str, found: Survey) -> Finding:
    """An engine that has no row: its plugin may be here all the same, and have come to nothing."""
    for plugin in found.plugins:
        if plugin.name == engine and plugin.state != "active":
            what = f"{engine} cannot be used. Plugin {plugin.sentence}."
            return Finding(engine, what, plugin.fix, plugin.command)
    near = near_names(engine, {row.engine for row in found.engines})
    hint = f"; near: {', '.join(near)}" if near else ""
    what = f"No plugin registers {engine}{hint}."
    fix = f"Install a distribution that registers a backend for {engine}"
    return Finding(engine, what, f"{fix}, or write {near[0]}." if near else f"{fix}.")


def _remarks(found: Survey) -> tuple[str, ...]:
    rollouts = [row for row in found.engines if row.role == "rollout" and row.state in _USABLE]
    if rollouts:
        return ()
    return (_NO_ROLLOUT,)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
