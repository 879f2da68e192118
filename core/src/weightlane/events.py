"""Events that observers receive through `weightlane_sync_event`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

EventKind: TypeAlias = Literal[
    "planned",
    "sync-started",
    "bucket-moved",
    "replica-reported",
    "base-sent",
    "published",
    "sync-failed",
    "closed",
]
"""`base-sent`: in mode adapter, the base was brought to replicas that did not hold it, before the adapter."""


if TYPE_CHECKING:
    from weightlane.hook_calls import HookCalls


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


@dataclass(slots=True)
class EventSource:
    """Tells observers the steps of one lane on one rank; `sync` is the one that is told of."""

    registry: HookCalls
    lane: str
    rank: int
    sync: int = 0

    def tell(
        self, kind: EventKind, version: int, *, nbytes: int = 0, seconds: float = 0.0, detail: str = ""
    ) -> None:
        """Calls every observer."""
        self.registry.emit(SyncEvent(kind, self.lane, self.rank, self.sync, version, nbytes, seconds, detail))
