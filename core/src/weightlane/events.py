"""Events that observers receive through `weightlane_sync_event`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal[
    "planned", "sync-started", "bucket-moved", "replica-reported", "published", "sync-failed", "closed"
]


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One step of a lane on one rank.

    `nbytes` is what moved in this step, `seconds` how long it took, `detail` a sentence for people.
    """

    kind: EventKind
    lane: str
    rank: int
    sync: int = 0
    version: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    detail: str = ""
