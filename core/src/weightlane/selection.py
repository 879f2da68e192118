"""Selects one backend for an engine. Hook order and entry-point order never decide.

Of the registered backends those of the engine are judged (`weightlane.candidates`); a viable one whose range
holds the version goes before one that only its probe speaks for; then the larger priority wins; a tie is an
error. A pin restricts the candidates to one distribution, and nothing is ever taken in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightlane.candidates import Verdict, judge, newest_bound, oldest_bound
from weightlane.declared import normalized
from weightlane.discovery import not_usable
from weightlane.errors import PinError, PluginError, SelectionError, near_names
from weightlane.hook_calls import Selected
from weightlane.lock_check import differences_here, locked_backend, refuse, require_locked
from weightlane.notices import log_once, warn_once
from weightlane.pins import (
    Pin,
    assume_variable,
    assumed_version,
    engine_key,
    parse_pin,
    with_assumed_version,
)
from weightlane.refusals import claimants, raise_no_candidate, raise_tie, raise_unmet_pin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.facts import EngineFacts
    from weightlane.registry import Registry
    from weightlane.types import Role


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend chosen, its verdict, and those of every backend that was considered."""

    selected: Selected
    winner: Verdict
    verdicts: tuple[Verdict, ...]


def select(
    registry: Registry, role: Role, engine: str, facts: EngineFacts, *, pin: str | None = None
) -> Selected:
    """Chooses the backend for one engine.

    Args:
        registry: the plugins of this process.
        role: `trainer` or `rollout`.
        engine: the engine's name, such as `vllm`.
        facts: what is known of the engine; a version assumed by the user is put in its place.
        pin: a distribution, optionally with a version range and an entry point (`acme-vllm==1.2.*`,
            `acme-vllm[fast]`); goes before `WEIGHTLANE_PIN_<ENGINE>` and `[tool.weightlane.pins]`.

    Returns:
        The backend with its evidence, and notes on whatever a user should know about the choice. Running
        an engine newer than every range is warned of, too. The decision on every candidate is logged to
        `weightlane.selection`, once per process, and remembered by the registry for `write_lock`.

    Raises:
        LockError: the registry holds a lock, and what would be chosen is not what it names.
        SelectionError: no backend fits, or several do equally well; every candidate is listed.
        PinError: the pin cannot be met.
        PluginError: the plugin that was asked for is broken; its own error is the cause.
    """
    choice = choose(registry, role, engine, facts, pin=pin)
    if choice.winner.position == "above":
        warn_once(f"{choice.selected.origin}: {choice.winner.notes[0]}.")
    facts = with_assumed_version(facts, registry.environ)
    log_once(_decision(role, engine, facts, choice))
    registry.locks.remember(locked_backend(registry, choice.selected, facts))
    return choice.selected


def choose(
    registry: Registry, role: Role, engine: str, facts: EngineFacts, *, pin: str | None = None
) -> Choice:
    """Like `select`, without its warning and its log record, and with every verdict: for listings."""
    held = registry.locks.held
    facts = with_assumed_version(facts, registry.environ)
    try:
        choice = _choose(registry, role, engine, facts, pin)
    except (SelectionError, PluginError) as exc:
        rows = held.rows(role, engine) if held else ()
        differences = [item for row in rows for item in differences_here(registry, row)] if held else []
        if held and differences:
            refuse(held, registry, differences, cause=exc)
        raise
    if held is None:
        return choice
    notes = require_locked(held, registry, locked_backend(registry, choice.selected, facts))
    return replace(choice, selected=replace(choice.selected, notes=(*choice.selected.notes, *notes)))


def _choose(registry: Registry, role: Role, engine: str, facts: EngineFacts, pin: str | None) -> Choice:
    wanted = parse_pin(pin, f"argument plugin={pin!r}") if pin else registry.pins.get(engine_key(engine))
    if wanted is not None:
        require_pinned_plugin(registry, wanted, engine)
    verdicts = judge_all(registry, role, engine, facts)
    if wanted is not None:
        verdicts = tuple(
            item for item in verdicts if wanted.names(item.backend.distribution, _entry(registry, item))
        )
    viable = [item for item in verdicts if item.viable]
    if not viable:
        if wanted is not None:
            raise_unmet_pin(registry, wanted, role, engine, verdicts)
        raise_no_candidate(registry, role, engine, verdicts)
    winner = _best(engine, viable)
    return Choice(_selected(registry, winner, engine, facts, wanted), winner, verdicts)


def judge_all(registry: Registry, role: Role, engine: str, facts: EngineFacts) -> tuple[Verdict, ...]:
    """A verdict on every backend of this engine and role, those of refused plugins included."""
    stated_by = assume_variable(engine) if assumed_version(engine, registry.environ) else ""
    return tuple(
        judge(item, facts, stated_by=stated_by)
        for item in (*registry.backends(), *registry.refused_backends())
        if (item.descriptor.engine, item.descriptor.role) == (engine, role)
    )


def _decision(role: Role, engine: str, facts: EngineFacts, choice: Choice) -> str:
    """What was decided on every candidate and why, in one line of a log."""
    chosen = choice.selected
    found = f"{engine} {facts.version}".rstrip()
    words = [f"{role} {found} (facts from {facts.source}): chosen {chosen.origin}, since"]
    words.append("; ".join(chosen.evidence) or "nothing speaks against it")
    words += [f"| note: {note}" for note in chosen.notes]
    words += [
        f"| not chosen {item.backend.origin}: {item.reason or 'another goes before it'}"
        for item in choice.verdicts
        if item is not choice.winner
    ]
    return " ".join(words)


def _rank(verdict: Verdict) -> tuple[bool, int]:
    # A range that holds the version was tested with it; a lone probe only says that it may work.
    return (verdict.position == "inside", verdict.backend.descriptor.priority)


def _best(engine: str, viable: Sequence[Verdict]) -> Verdict:
    """The winner: first among each plugin's own eras, then among plugins, where a tie is an error."""
    by_plugin: dict[str, list[Verdict]] = {}
    for item in viable:
        by_plugin.setdefault(item.backend.plugin_name, []).append(item)
    winners = _top([era for items in by_plugin.values() for era in _nearest_eras(_top(items))])
    if len(winners) > 1:
        raise_tie(engine, winners)
    return winners[0]


def _top(verdicts: Sequence[Verdict]) -> list[Verdict]:
    best = max(_rank(item) for item in verdicts)
    return [item for item in verdicts if _rank(item) == best]


def _nearest_eras(eras: Sequence[Verdict]) -> list[Verdict]:
    """Of one plugin's eras that only their probes speak for, those whose range lies nearest.

    A version between two eras (`2.0.dev1` fits neither `<2` nor `>=2`) counts as the newer one's: its probe
    found what the older contract lacks.
    """
    below = [item for item in eras if item.position == "below"]
    above = [item for item in eras if item.position == "above"]
    if below:
        oldest = min(oldest_bound(item.backend.descriptor.versions) for item in below)
        return [item for item in below if oldest_bound(item.backend.descriptor.versions) == oldest]
    if above:
        newest = max(newest_bound(item.backend.descriptor.versions) for item in above)
        return [item for item in above if newest_bound(item.backend.descriptor.versions) == newest]
    return list(eras)


def _entry(registry: Registry, verdict: Verdict) -> str:
    return registry.status_of(verdict.backend).name


def _selected(
    registry: Registry, winner: Verdict, engine: str, facts: EngineFacts, pin: Pin | None
) -> Selected:
    notes = list(winner.notes)
    if assumed_version(engine, registry.environ):
        notes.append(f"version {facts.version} of {engine} is assumed, as {assume_variable(engine)} says")
    notes += [
        f"another plugin for {engine} cannot be used: {status.sentence}"
        for status in claimants(registry, engine)
        if status.state != "disabled"
    ]
    evidence = winner.evidence if pin is None else (*winner.evidence, f"pinned to {pin.text} by {pin.origin}")
    return replace(winner.backend, evidence=evidence, notes=tuple(notes))


def require_pinned_plugin(registry: Registry, pin: Pin, engine: str) -> None:
    """Sees to it that the pinned plugin is here, of the pinned version, and active.

    Raises:
        PinError: it is not.
        PluginError: it is broken; its own error is the cause.
    """
    registry.admit(pin.distribution, pin.entry)
    statuses = registry.statuses()
    ours = [item for item in statuses if normalized(item.distribution) == pin.distribution]
    named = [item for item in ours if pin.entry in {"", item.name}]
    if not named:
        what = f"has no entry point {pin.entry}" if ours else "is not installed, or registers no plugin"
        candidates = [item.name for item in ours] if ours else [item.distribution for item in statuses]
        near = near_names(pin.entry if ours else pin.distribution, candidates) or tuple(
            sorted(set(candidates))
        )
        raise PinError(
            f"The pin {pin.text} for {engine} ({pin.origin}) cannot be met.",
            f"{pin.distribution} {what}; there is {', '.join(near) or 'no plugin at all'}.",
            f"Run pip install '{pin.distribution}{pin.versions}', or change the pin.",
        )
    version = named[0].version
    if not pin.allows(version):
        raise PinError(
            f"The pin {pin.text} for {engine} ({pin.origin}) cannot be met.",
            f"{pin.distribution} {version or 'of unknown version'} is installed.",
            f"Run pip install '{pin.distribution}{pin.versions}', or change the pin.",
        )
    usable = [item for item in named if item.state == "active"]
    if usable:
        return
    cause = registry.cause_of(named[0])
    if named[0].state == "broken":
        raise not_usable(named[0]) from cause
    raise PinError(
        f"The pin {pin.text} for {engine} ({pin.origin}) cannot be met.",
        f"Plugin {named[0].sentence}.",
        not_usable(named[0]).fix,
    )


__all__ = ["Choice", "Selected", "choose", "judge_all", "require_pinned_plugin", "select"]
