"""What would be selected here, for a lock to be written or compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import SelectionError, WeightlaneError
from weightlane.lock_check import LockDifference, differences_here, differences_of, locked_backend
from weightlane.selection import select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import RolloutTarget
    from weightlane.lock_check import HeldLock
    from weightlane.lock_file import LockedBackend
    from weightlane.registry import Registry
    from weightlane.types import Role


@dataclass(frozen=True, slots=True)
class Asked:
    """One engine to lock; `target` is a live one, or None for what is installed here."""

    role: Role
    engine: str
    target: RolloutTarget | None = None

    def __str__(self) -> str:
        at = f" at {self.target.address}" if self.target else ""
        return f"{self.role} {self.engine}{at}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine for which nothing can be selected here, and why."""

    asked: Asked
    reason: str


def select_asked(registry: Registry, asked: Sequence[Asked]) -> tuple[LockedBackend, ...]:
    """What would be selected for each.

    Raises:
        WeightlaneError: of one engine that nothing can be selected for.
        SelectionError: of several, each with its reason.
    """
    found: list[LockedBackend] = []
    failures: list[tuple[Asked, WeightlaneError]] = []
    for item in asked:
        try:
            found.append(_selected(registry, item))
        except WeightlaneError as exc:
            failures.append((item, exc))
    if len(failures) == 1:
        raise failures[0][1]
    if failures:
        lines = "\n".join(f"  {item}: {exc}" for item, exc in failures)
        raise SelectionError(f"Of {len(asked)} engines {len(failures)} cannot be selected.", f"\n{lines}")
    return tuple(found)


def installed_here(registry: Registry) -> tuple[tuple[Asked, ...], tuple[LeftOut, ...]]:
    """Every registered engine that is installed here, and those that are not."""
    pairs = sorted({(item.descriptor.role, item.descriptor.engine) for item in registry.backends()})
    here: list[Asked] = []
    absent: list[LeftOut] = []
    for role, engine in pairs:
        if registry.collect_facts(engine).version:
            here.append(Asked(role, engine))
        else:
            absent.append(LeftOut(Asked(role, engine), f"{engine} is not installed here"))
    return tuple(here), tuple(absent)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A lock beside what would be selected; `different` are selections that it does not name.

    Of `not_selected` engines, which are not installed here, the plugins alone were compared.
    """

    differences: tuple[LockDifference, ...]
    different: tuple[LockedBackend, ...]
    not_selected: tuple[LeftOut, ...]


def compare(held: HeldLock, registry: Registry, asked: Sequence[Asked]) -> Comparison:
    """Compares what would be selected with a lock; without `asked`, for every engine that the lock names."""
    absent: list[LeftOut] = []
    if not asked:
        every = dict.fromkeys(Asked(row.role, row.engine) for row in held.lock.backends)
        asked = [item for item in every if registry.collect_facts(item.engine).version]
        absent = [
            LeftOut(item, f"{item.engine} is not installed here") for item in every if item not in asked
        ]
    differences: dict[LockDifference, None] = {}
    different: list[LockedBackend] = []
    for item in asked:
        try:
            found = _selected(registry, item)
        except WeightlaneError as exc:
            differences.update(
                dict.fromkeys(_of_plugins(held, registry, item) or [_nothing(held, item, exc)])
            )
            continue
        apart = differences_of(held, found)
        differences.update(dict.fromkeys(apart))
        different += [found] if apart else []
    for left_out in absent:
        differences.update(dict.fromkeys(_of_plugins(held, registry, left_out.asked)))
    return Comparison(tuple(differences), tuple(different), tuple(absent))


def _selected(registry: Registry, asked: Asked) -> LockedBackend:
    facts = registry.collect_facts(asked.engine, asked.target)
    return locked_backend(registry, select(registry, asked.role, asked.engine, facts), facts)


def _of_plugins(held: HeldLock, registry: Registry, asked: Asked) -> list[LockDifference]:
    rows = held.rows(asked.role, asked.engine)
    return [item for row in rows for item in differences_here(registry, row)]


def _nothing(held: HeldLock, asked: Asked, error: WeightlaneError) -> LockDifference:
    rows = held.rows(asked.role, asked.engine)
    locked = " or ".join(row.origin for row in rows) or "none for this engine"
    return LockDifference(f"{asked.role} {asked.engine}", "backend", locked, f"none, since {error}")
