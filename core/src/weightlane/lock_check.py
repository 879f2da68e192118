"""Compares a selection with a lock. Every difference is told at once, with the evidence of then and now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from weightlane import __version__
from weightlane.errors import LockError
from weightlane.facts import EngineFacts, no_facts
from weightlane.lock_file import Lock, LockedBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightlane.hook_calls import Selected
    from weightlane.registry import Registry
    from weightlane.types import Role


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock in force; `origin` says in messages where it was read and who asked for it."""

    lock: Lock
    origin: str

    def rows(self, role: Role, engine: str) -> tuple[LockedBackend, ...]:
        """What the lock allows for one engine."""
        return tuple(row for row in self.lock.backends if (row.role, row.engine) == (role, engine))


class LockDifference(msgspec.Struct, frozen=True):
    """One field in which a selection differs from the lock; `found` is what is here."""

    subject: str
    field: str
    locked: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.field}: the lock names {self.locked}, here is {self.found}"


def locked_backend(registry: Registry, selected: Selected, facts: EngineFacts) -> LockedBackend:
    """A selection as a lock names it."""
    descriptor = selected.descriptor
    return LockedBackend(
        role=descriptor.role,
        engine=descriptor.engine,
        backend=descriptor.name,
        era=descriptor.era,
        distribution=selected.distribution,
        version=selected.version,
        entry_point=registry.status_of(selected).name,
        engine_version=facts.version,
        evidence=selected.evidence,
    )


def differences_of(held: HeldLock, found: LockedBackend) -> tuple[LockDifference, ...]:
    """In what a selection differs from the row of the lock that is nearest to it; empty when one is met."""
    subject = f"{found.role} {found.engine}"
    rows = held.rows(found.role, found.engine)
    if not rows:
        return (*_core(held), LockDifference(subject, "backend", "none for this engine", found.origin))
    nearest = min((_compared(row, found) for row in rows), key=len)
    return (*_core(held), *nearest)


def differences_here(registry: Registry, row: LockedBackend) -> tuple[LockDifference, ...]:
    """In what the plugins here differ from one row, whatever is selected: that takes no engine."""
    subject = f"{row.role} {row.engine}"
    statuses = [item for item in registry.statuses() if item.distribution == row.distribution]
    if not statuses:
        missing = LockDifference(subject, "distribution", f"{row.distribution} {row.version}", "none of it")
        return (missing,)
    found: list[LockDifference] = []
    if statuses[0].version != row.version:
        here = f"{row.distribution} {statuses[0].version or 'of unknown version'}"
        found.append(LockDifference(subject, "version", f"{row.distribution} {row.version}", here))
    own = next((item for item in statuses if item.name == row.entry_point), None)
    if own is None:
        names = ", ".join(item.name for item in statuses)
        return (*found, LockDifference(subject, "entry point", row.entry_point, names))
    if own.state != "active":
        return (*found, LockDifference(subject, "state", "an active plugin", f"a plugin that {own.sentence}"))
    eras = [item.descriptor for item in registry.backends() if item.plugin_name == own.key]
    eras = [
        item for item in eras if (item.role, item.engine, item.name) == (row.role, row.engine, row.backend)
    ]
    if row.era not in {item.era for item in eras}:
        names = ", ".join(item.era for item in eras) or "no backend of this engine"
        found.append(LockDifference(subject, "era", row.era, names))
    return tuple(found)


def require_locked(held: HeldLock, registry: Registry, found: LockedBackend) -> tuple[str, ...]:
    """Refuses a selection that the lock does not name; gives notes on what differs and may.

    Raises:
        LockError: it differs; whatever else in the plugins here differs from the lock is listed, too.
    """
    differences = differences_of(held, found)
    if differences:
        refuse(held, registry, differences, [found])
    rows = held.rows(found.role, found.engine)
    versions = {row.engine_version for row in rows if not _compared(row, found)} - {""}
    if not versions or found.engine_version in versions:
        return ()
    locked = " or ".join(sorted(versions))
    return (f"{held.origin} was written with {found.engine} {locked}; here is {found.engine_version}",)


def require_possible(held: HeldLock, registry: Registry, role: Role, engine: str) -> None:
    """Refuses an engine that has not been started yet, when no plugin here could be what the lock names.

    Raises:
        LockError: the lock has no row for the engine, or the plugins here differ from every one.
    """
    apart = [differences_here(registry, row) for row in held.rows(role, engine)]
    if not apart:
        backends = (item for item in registry.backends() if item.descriptor.role == role)
        here = ", ".join(item.origin for item in backends if item.descriptor.engine == engine)
        missing = LockDifference(f"{role} {engine}", "backend", "none for this engine", here or "none")
        apart = [(missing,)]
    if all(apart) or _core(held):
        refuse(held, registry, (*_core(held), *min(apart, key=len)))


def require_origin(held: HeldLock, registry: Registry, backend: Selected) -> None:
    """The same for a backend that another process selected and this one, an engine's, looked up by name.

    Raises:
        LockError: it differs.
    """
    differences = differences_of(held, locked_backend(registry, backend, no_facts(backend.descriptor.engine)))
    if differences:
        refuse(held, registry, differences)


def refuse(
    held: HeldLock,
    registry: Registry,
    differences: Sequence[LockDifference],
    found: Sequence[LockedBackend] = (),
    cause: BaseException | None = None,
) -> NoReturn:
    """Raises the one error that lists these differences and those of other rows whose plugins are here."""
    here = {item.distribution for item in registry.statuses()}
    asked = {(item.role, item.engine) for item in found}
    others = [
        item
        for row in held.lock.backends  # a rank needs no plugin but those of the engines that it selects
        if row.distribution in here or (row.role, row.engine) in asked
        for item in differences_here(registry, row)
    ]
    told = dict.fromkeys(sorted((*others, *differences), key=lambda item: (item.subject, item.field)))
    lines = [f"  {item}" for item in told]
    for item in found:
        rows = held.rows(item.role, item.engine)
        lines += [f"  {row.origin} was locked on: {_words(row.evidence)}" for row in rows]
        lines.append(f"  {item.origin} was chosen here on: {_words(item.evidence)}")
    if cause is not None:
        lines.append(f"  Nothing could be chosen: {cause}")
    count = f"{len(told)} place{'' if len(told) == 1 else 's'}"
    raise LockError(
        f"What is here differs from the lock in {count} ({held.origin}).",
        "\n" + "\n".join(lines) + "\n",
        f"{_advice(held, told)}, or write a new lock with weightlane lock.",
    ) from cause


def _advice(held: HeldLock, differences: Iterable[LockDifference]) -> str:
    if not any(item.field in {"distribution", "version"} for item in differences):
        return "Use the engines and the pins that it was written with"
    wanted = {f"weightlane=={held.lock.weightlane}"}
    wanted |= {f"{row.distribution}=={row.version}" for row in held.lock.backends if row.version}
    return f"Run pip install {' '.join(repr(item) for item in sorted(wanted))}"


def _core(held: HeldLock) -> tuple[LockDifference, ...]:
    if held.lock.weightlane == __version__:
        return ()
    return (LockDifference("weightlane", "version", held.lock.weightlane, __version__),)


def _compared(row: LockedBackend, found: LockedBackend) -> list[LockDifference]:
    subject = f"{found.role} {found.engine}"
    pairs = [
        ("distribution", row.distribution, found.distribution),
        ("version", f"{row.distribution} {row.version}", f"{found.distribution} {found.version}"),
        ("entry point", row.entry_point, found.entry_point),
        ("backend", row.backend, found.backend),
        ("era", row.era, found.era),
    ]
    return [
        LockDifference(subject, field, locked.strip(), other.strip())
        for field, locked, other in pairs
        if locked != other
    ]


def _words(evidence: Sequence[str]) -> str:
    return "; ".join(evidence) or "no evidence"
