"""What became of one engine here, in words for somebody who meets it for the first time."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from weightlane.catalogue import PUBLISHED, install_command
from weightlane.discovery import not_usable
from weightlane.errors import PinError, PluginError, WeightlaneError
from weightlane.pins import assume_variable, engine_key
from weightlane.refusals import claimants
from weightlane.selection import require_pinned_plugin

if TYPE_CHECKING:
    from weightlane.candidates import Verdict
    from weightlane.facts import EngineFacts
    from weightlane.lock_check import HeldLock
    from weightlane.lock_file import LockedBackend
    from weightlane.registry import Registry, Selected
    from weightlane.types import Role

EngineState: TypeAlias = Literal[
    "usable", "assumed", "not-installed", "no-plugin", "absent", "blocked", "problem"
]
"""`usable`: installed, and a backend was chosen. `assumed`: a backend was chosen for a version that the user
stated; nothing of the engine was seen. `not-installed`: a plugin is here, its engine is not. `no-plugin`: the
engine is here, a plugin for it is not. `absent`: neither is. `blocked`: the plugin that serves it cannot be
used. `problem`: something that was asked for cannot work."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one role: its version here ("" if it is not installed) and the backend chosen for it.

    `says` explains the state. `problem` is "" unless something is wrong whoever asks; an engine that is not
    installed is not. `fix` says what would change the state, `command` is the shell command for it where one
    command does it.
    """

    engine: str
    role: str = ""
    version: str = ""
    source: str = ""
    state: EngineState
    backend: str = ""
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    says: str
    problem: str = ""
    fix: str = ""
    command: str = ""


def row_of_chosen(role: Role, facts: EngineFacts, chosen: Selected) -> EngineRow:
    """An engine for which a backend was chosen."""
    assumed = facts.source == "assumed"
    stated = f"Nothing of it was seen here; its version is what {assume_variable(facts.engine)} states."
    return EngineRow(
        engine=facts.engine,
        role=role,
        version=facts.version,
        source=facts.source,
        state="assumed" if assumed else "usable",
        backend=chosen.origin,
        evidence=chosen.evidence,
        notes=chosen.notes,
        says=stated if assumed else f"It is installed here, and {chosen.origin} serves it.",
    )


def row_of_error(
    role: Role, facts: EngineFacts, error: WeightlaneError, verdicts: tuple[Verdict, ...]
) -> EngineRow:
    """An engine that is here or was asked for, and that no backend can serve."""
    problem = " ".join(part for part in (error.what, error.why) if part)
    fix, command = error.fix, ""
    if not isinstance(error, PinError | PluginError):
        fix, command = _fit(verdicts, facts) or (fix, command)
    return EngineRow(
        engine=facts.engine,
        role=role,
        version=facts.version,
        source=facts.source if facts.version else "",
        state="problem",
        says=problem,
        problem=problem,
        fix=fix,
        command=command,
    )


def row_of_lock(
    registry: Registry, role: Role, facts: EngineFacts, error: WeightlaneError
) -> tuple[EngineRow, str]:
    """An engine whose backend the lock in force refuses, and in short why."""
    held = registry.locks.held
    if held is None or held.rows(role, facts.engine):
        return row_of_error(role, facts, error, ()), "the lock refuses it; see doctor"
    # Installed, and of no concern to a run that keeps to the lock.
    says = f"{held.origin} does not name it"
    row = EngineRow(
        engine=facts.engine,
        role=role,
        version=facts.version,
        source=facts.source,
        state="blocked",
        says=f"{says}.",
        fix="To use it, write a new lock with weightlane lock.",
    )
    return row, says


def row_of_stray_lock(held: HeldLock, locked: LockedBackend) -> EngineRow:
    """A row of the lock for an engine that nobody here registers: what it names is missing."""
    problem = f"{held.origin} names {locked.origin}, and no active plugin here registers {locked.engine}."
    command = f"pip install '{locked.distribution}=={locked.version}'"
    return EngineRow(
        engine=locked.engine,
        state="problem",
        says=problem,
        problem=problem,
        fix=f"Run {command}, or write a new lock with weightlane lock.",
        command=command,
    )


def row_without_engine(role: Role, engine: str, verdicts: tuple[Verdict, ...]) -> EngineRow:
    """An engine that is not installed, while a plugin for it is."""
    hints = [item.backend.descriptor.install_hint for item in verdicts]
    command = next((hint for hint in hints if hint), "") or _fitting(verdicts, "")
    says = "Its plugin is here, the engine is not."
    if role == "rollout":
        says += " That is right on a trainer or a controller: they reach engines by address."
    fix = f"Where {engine} is to run: {command}." if command else f"Install {engine} where it is to run."
    return EngineRow(engine=engine, role=role, state="not-installed", says=says, fix=fix, command=command)


def row_without_plugin(registry: Registry, engine: str) -> EngineRow:
    """An engine that no active plugin here serves, installed or not."""
    version = _installed(engine)
    row = EngineRow(
        engine=engine, version=version, source="installed" if version else "", state="absent", says=""
    )
    unusable = claimants(registry, engine)
    if unusable:
        return msgspec.structs.replace(
            row,
            state="blocked",
            says=f"Plugin {unusable[0].sentence}.",
            fix=not_usable(unusable[0]).fix,
        )
    command = install_command(engine)
    return msgspec.structs.replace(
        row,
        state="no-plugin" if version else "absent",
        says=f"It {'is' if version else 'is not'} installed, and no plugin here serves it.",
        fix=f"Run {command}.",
        command=command,
    )


def row_of_stray_pin(engine: str, origin: str, text: str, requirement: str) -> EngineRow:
    """A pin for an engine that nobody here registers: what was asked for is missing."""
    problem = f"{origin} pins {text} for {engine}, and no plugin here registers that engine."
    command = f"pip install '{requirement}'"
    return EngineRow(
        engine=engine,
        state="problem",
        says=problem,
        problem=problem,
        fix=f"Run {command}, or remove the pin.",
        command=command,
    )


def pin_error(registry: Registry, engine: str) -> WeightlaneError | None:
    """The error of a pin whose plugin is not here; None when only the engine is not."""
    try:
        require_pinned_plugin(registry, registry.pins[engine_key(engine)], engine)
    except WeightlaneError as exc:
        return exc
    return None


def _fit(verdicts: tuple[Verdict, ...], facts: EngineFacts) -> tuple[str, str] | None:
    """What to do, and the command, where the version lies outside of what the plugin serves."""
    outside = [item for item in verdicts if item.position in {"above", "below"}]
    if not outside or any(item.viable for item in verdicts):
        return None
    descriptor = outside[0].backend.descriptor
    engine = descriptor.install_hint or _fitting(verdicts, facts.version)
    if outside[0].position == "below":
        return f"Run {engine} for a version that it serves.", engine
    plugin = f"pip install -U {outside[0].backend.distribution}"
    known = f"{facts.engine} {facts.version}"
    return f"Run {plugin} for a plugin that may know {known}, or {engine} for a version served now.", plugin


def _fitting(verdicts: tuple[Verdict, ...], version: str) -> str:
    """The command that installs a version in range, under the name by which the engine is installed now."""
    for item in verdicts:
        descriptor = item.backend.descriptor
        names = [name for name in descriptor.distributions if version and _version(name) == version]
        for name in (*names, *descriptor.distributions):
            return f"pip install '{name}{descriptor.versions}'"
    return ""


def _installed(engine: str) -> str:
    published = PUBLISHED.get(engine)
    names = published.engine_distributions if published else ()
    return next((found for name in names if (found := _version(name))), "")


def _version(name: str) -> str:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return ""
