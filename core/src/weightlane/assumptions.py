"""What is assumed of a replica that cannot be traced: the contract snapshot of its version, if one fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightlane.errors import Problem
    from weightlane.facts import EngineFacts
    from weightlane.manifest import Manifest
    from weightlane.receiver import WorkerDescription


@dataclass(frozen=True, slots=True)
class AssumptionContext:
    """An untraced replica: what it is, what is to be sent to it, and why it could not be traced."""

    facts: EngineFacts
    manifest: Manifest
    workers: tuple[WorkerDescription, ...]
    untraced: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a snapshot says. `source` names it for people, `problems` are what it refuses of the plan."""

    source: str
    problems: tuple[Problem, ...] = ()


def assumption_for(context: AssumptionContext) -> Assumption | None:
    """The assumption that fits, or None: then the replica stays `untraced`."""
    del context
    return None
