"""What is registered here and what would be chosen for what is installed: `backends` and `doctor` show it."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

import msgspec

from weightlane.catalogue import PUBLISHED, install_command
from weightlane.errors import PinError, PluginError, WeightlaneError
from weightlane.notices import PluginWarning
from weightlane.selection import Choice, choose, judge_all, require_pinned_plugin

if TYPE_CHECKING:
    from weightlane.candidates import Verdict
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


class EngineRow(msgspec.Struct, frozen=True):
    """One engine in one role: its version here ("" if it is not installed) and the backend chosen for it.

    `problem` and `fix` are "" unless something is wrong; an engine that is not installed is not.
    """

    engine: str
    role: str
    version: str
    source: str
    backend: str
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    problem: str
    fix: str


class PluginRow(msgspec.Struct, frozen=True):
    """One plugin and how it fared."""

    name: str
    distribution: str
    version: str
    state: str
    error: str
    hooks: tuple[str, ...]
    sentence: str


class Survey(msgspec.Struct, frozen=True):
    """Everything the two commands show."""

    plugins: tuple[PluginRow, ...]
    backends: tuple[BackendRow, ...]
    engines: tuple[EngineRow, ...]


def survey() -> Survey:
    """Looks at this process's registry and at what is installed, importing neither torch nor an engine."""
    from weightlane.registry import get_registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the commands show the states themselves
        return survey_of(get_registry())


def survey_of(registry: Registry) -> Survey:
    """The survey of one registry."""
    pairs = sorted({(item.descriptor.role, item.descriptor.engine) for item in registry.backends()})
    backends: list[BackendRow] = []
    engines: list[EngineRow] = []
    for role, engine in pairs:
        engine_row, backend_rows = _look_at(registry, role, engine)
        engines.append(engine_row)
        backends += backend_rows
    served = {engine for _, engine in pairs}
    engines += [_unserved(engine) for engine in PUBLISHED if engine not in served]
    engines += _pinned_elsewhere(registry, served | set(PUBLISHED))
    plugins = tuple(
        PluginRow(
            item.name, item.distribution, item.version, item.state, item.error, item.hooks, item.sentence
        )
        for item in registry.statuses()
    )
    return Survey(plugins, tuple(backends), tuple(engines))


def _look_at(registry: Registry, role: Role, engine: str) -> tuple[EngineRow, list[BackendRow]]:
    choice: Choice | None = None
    version = source = ""
    error: WeightlaneError | None = None
    verdicts: tuple[Verdict, ...] = ()
    try:
        facts = registry.collect_facts(engine)
        version, source = facts.version, facts.source
        verdicts = judge_all(registry, role, engine, facts)
        choice = choose(registry, role, engine, facts)
    except WeightlaneError as exc:
        error = exc
    chosen = choice.selected if choice else None
    if error is not None and not version and not isinstance(error, PinError | PluginError):
        error = None  # not installed here: nothing is wrong
    if isinstance(error, PinError) and not version:
        error = _pin_error(registry, engine)
    row = EngineRow(
        engine=engine,
        role=role,
        version=version,
        source=source if version else "",
        backend=chosen.origin if chosen else "",
        evidence=chosen.evidence if chosen else (),
        notes=chosen.notes if chosen else (),
        problem=" ".join(part for part in (error.what, error.why) if part) if error else "",
        fix=error.fix if error else _missing_fix(verdicts, engine, version),
    )
    return row, [_backend_row(registry, item, chosen, engine, version) for item in verdicts]


def _pin_error(registry: Registry, engine: str) -> WeightlaneError | None:
    """The error of a pin whose plugin is not here; None when only the engine is not."""
    from weightlane.pins import engine_key

    try:
        require_pinned_plugin(registry, registry.pins[engine_key(engine)], engine)
    except WeightlaneError as exc:
        return exc
    return None


def _missing_fix(verdicts: tuple[Verdict, ...], engine: str, version: str) -> str:
    if version:
        return ""
    hints = [
        item.backend.descriptor.install_hint for item in verdicts if item.backend.descriptor.install_hint
    ]
    return next(iter(hints), install_command(engine))


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


def _unserved(engine: str) -> EngineRow:
    """An engine that no active plugin here serves, installed or not."""
    for name in PUBLISHED[engine].engine_distributions:
        try:
            version = installed_version(name)
        except PackageNotFoundError:
            continue
        return _row_without_plugin(engine, version)
    return _row_without_plugin(engine, "")


def _row_without_plugin(engine: str, version: str) -> EngineRow:
    return EngineRow(
        engine, "", version, "installed" if version else "", "", (), (), "", install_command(engine)
    )


def _pinned_elsewhere(registry: Registry, known: set[str]) -> list[EngineRow]:
    """Pins of engines that nobody here registers: what was asked for is missing."""
    from weightlane.pins import engine_key

    keys = {engine_key(engine) for engine in known}
    rows: list[EngineRow] = []
    for key, pin in registry.pins.items():
        if key in keys:
            continue
        engine = key.lower()
        problem = f"{pin.origin} pins {pin.text} for {engine}, and no plugin here registers that engine."
        fix = f"Run pip install '{pin.distribution}{pin.versions}', or remove the pin."
        rows.append(EngineRow(engine, "", "", "", "", (), (), problem, fix))
    return rows
