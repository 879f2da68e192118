"""What is registered here and what would be chosen for what is installed: `backends` and `doctor` show it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import msgspec

from weightlane.catalogue import PUBLISHED
from weightlane.cli.engine_rows import (
    EngineRow,
    pin_error,
    row_of_chosen,
    row_of_error,
    row_of_lock,
    row_of_stray_lock,
    row_of_stray_pin,
    row_without_engine,
    row_without_plugin,
)
from weightlane.discovery import DISABLE_VARIABLE
from weightlane.errors import LockError, PinError, PluginError, WeightlaneError
from weightlane.facts import no_facts
from weightlane.notices import PluginWarning
from weightlane.pins import engine_key
from weightlane.selection import choose, judge_all

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.candidates import Verdict
    from weightlane.discovery import PluginStatus
    from weightlane.registry import Registry, Selected
    from weightlane.types import Role


class BackendRow(msgspec.Struct, frozen=True):
    """One registered backend. `reason` says why it was not chosen, "" for a chosen one."""

    name: str
    role: str
    engine: str
    era: str
    versions: str
    distribution: str
    version: str
    state: str
    chosen: bool
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    reason: str


class PluginRow(msgspec.Struct, frozen=True):
    """One plugin and how it fared.

    `sentence` tells the state in one sentence, without a full stop. `fix` says what makes an unusable plugin
    usable, or gets rid of it; `command` is the shell command for it. Both are "" for an active one.
    """

    name: str
    distribution: str
    version: str
    state: str
    error: str
    hooks: tuple[str, ...]
    engines: tuple[str, ...]
    sentence: str
    fix: str
    command: str


class Survey(msgspec.Struct, frozen=True):
    """Everything the two commands show."""

    plugins: tuple[PluginRow, ...]
    backends: tuple[BackendRow, ...]
    engines: tuple[EngineRow, ...]


def survey(locked: Path | None = None) -> Survey:
    """Looks at this process's registry and at what is installed, importing neither torch nor an engine.

    Raises:
        LockError: `locked`, or the lock that `WEIGHTLANE_LOCKED` names, cannot be read.
    """
    from weightlane.registry import get_registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the commands show the states themselves
        registry = get_registry()
        return survey_of(registry if locked is None else registry.under_lock(locked))


def survey_of(registry: Registry) -> Survey:
    """The survey of one registry."""
    held = registry.locks.held  # one that cannot be read is an error of its own, not of each engine
    pairs = sorted({(item.descriptor.role, item.descriptor.engine) for item in registry.backends()})
    backends: list[BackendRow] = []
    engines: list[EngineRow] = []
    for role, engine in pairs:
        engine_row, backend_rows = _look_at(registry, role, engine)
        engines.append(engine_row)
        backends += backend_rows
    served = {engine for _, engine in pairs}
    statuses = registry.statuses()
    claimed = {engine for item in statuses if item.state != "active" for engine in item.engines}
    unserved = dict.fromkeys((*PUBLISHED, *sorted(claimed)))
    engines += [row_without_plugin(registry, engine) for engine in unserved if engine not in served]
    engines += _pinned_elsewhere(registry, {*served, *unserved})
    if held:
        engines += [row_of_stray_lock(held, row) for row in held.lock.backends if row.engine not in served]
    return Survey(tuple(map(_plugin_row, statuses)), tuple(backends), tuple(engines))


def _look_at(registry: Registry, role: Role, engine: str) -> tuple[EngineRow, list[BackendRow]]:
    chosen: Selected | None = None
    facts = no_facts(engine)
    error: WeightlaneError | None = None
    reason = ""
    verdicts: tuple[Verdict, ...] = ()
    try:
        facts = registry.collect_facts(engine)
        verdicts = judge_all(registry, role, engine, facts)
        chosen = choose(registry, role, engine, facts).selected
        if facts.source == "assumed" and not facts.version:
            chosen = None  # a probe that asks for nothing passes although there is no engine
    except WeightlaneError as exc:
        error = exc
    if not facts.version and not isinstance(error, PinError | PluginError | LockError):
        error = None  # not installed here: nothing is wrong
    if isinstance(error, PinError) and not facts.version:
        error = pin_error(registry, engine)
    if chosen is not None:
        row = row_of_chosen(role, facts, chosen)
    elif isinstance(error, LockError):
        row, reason = row_of_lock(registry, role, facts, error)
    elif error is not None:
        row = row_of_error(role, facts, error, verdicts)
    else:
        row = row_without_engine(role, engine, verdicts)
    rows = [_backend_row(registry, item, chosen, engine, facts.version) for item in verdicts]
    return row, [msgspec.structs.replace(item, reason=reason) for item in rows] if reason else rows


def _plugin_row(status: PluginStatus) -> PluginRow:
    fix, command = _mend(status)
    return PluginRow(
        name=status.name,
        distribution=status.distribution,
        version=status.version,
        state=status.state,
        error=status.error,
        hooks=status.hooks,
        engines=status.engines,
        sentence=status.sentence,
        fix=fix,
        command=command,
    )


def _mend(status: PluginStatus) -> tuple[str, str]:
    """What to do about a plugin that is not active, and the command that does it."""
    remove = f"pip uninstall {status.distribution}"
    if status.state == "active":
        return "", ""
    if status.state == "disabled":
        return f"To use it, take it out of {DISABLE_VARIABLE}.", ""
    if status.state == "conflict":
        command = f"export WEIGHTLANE_PIN_{engine_key(status.name)}={status.distribution}"
        return f"None of them is used until one is pinned ({command}) or removed ({remove}).", command
    command = f"pip install -U weightlane {status.distribution}"
    return f"The other plugins work without it. Run {command}, or {remove}.", command


def _backend_row(
    registry: Registry, verdict: Verdict, chosen: Selected | None, engine: str, version: str
) -> BackendRow:
    backend = verdict.backend
    is_chosen = chosen is not None and chosen.reference == backend.reference
    reason = verdict.reason
    if chosen is None and not version:
        reason = f"{engine} is not installed here"
    elif not is_chosen and not reason:
        reason = f"{chosen.origin} goes before it" if chosen else "the choice is not clear; see doctor"
    descriptor = backend.descriptor
    return BackendRow(
        name=descriptor.name,
        role=descriptor.role,
        engine=descriptor.engine,
        era=descriptor.era,
        versions=str(descriptor.versions) or "any",
        distribution=backend.distribution,
        version=backend.version,
        state=registry.status_of(backend).state,
        chosen=is_chosen,
        evidence=chosen.evidence if chosen and is_chosen else verdict.evidence,
        notes=chosen.notes if chosen and is_chosen else verdict.notes,
        reason="" if is_chosen else reason,
    )


def _pinned_elsewhere(registry: Registry, known: set[str]) -> list[EngineRow]:
    keys = {engine_key(engine) for engine in known}
    return [
        row_of_stray_pin(key.lower(), pin.origin, pin.text, f"{pin.distribution}{pin.versions}")
        for key, pin in registry.pins.items()
        if key not in keys
    ]
