"""The gate between generation and syncs: nothing is generated from half-written weights.

It looks only at the kind of each agent message that passes. A sync starts with `Receive`, `BeginInline` or
`ReceiveDisk`: running generations end first, new ones wait, unless the message says that generation goes on
(an adapter is loaded beside the one that serves); where it says that the engine itself holds the running ones
back, they are not waited for. A sync that shut the gate alone opens it again, by its end:
another one's end changes nothing meanwhile. `Publish` is an end. After a failure or a `Cancel` the workers
are asked whether they are servable; while one is not, generation is refused until a whole sync is published.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import NotServableError, SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATE_WAIT_SECONDS = 60.0
"""How long a generation waits for a sync in progress before it is refused."""


@dataclass(frozen=True, slots=True)
class GateSync:
    """Which sync a message belongs to: of which lane, and its number there."""

    lane: str
    number: int

    def __str__(self) -> str:
        return f"sync {self.number} of lane {self.lane}"


class ServingGate:
    """Many generations or one sync. Thread-safe; every wait is bounded."""

    def __init__(self) -> None:
        # Bounded by what its holders do, which is to look and to notify; both waits on it have timeouts.
        self._changed = threading.Condition()
        # Those that have shut it and not ended. More than one only while it is open which of them a worker
        # takes; the last is the one that a worker takes if it takes any.
        self._shut_by: list[GateSync] = []
        self._broken = ""
        self._generating = 0

    @contextmanager
    def generation(self, wait_seconds: float = GENERATE_WAIT_SECONDS) -> Iterator[None]:
        """Holds syncs back while a generation runs.

        Raises:
            NotServableError: a failed sync left a worker half-written, or a sync stays unpublished.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._shut_by, timeout=wait_seconds)
            if self._shut_by:
                raise NotServableError(
                    f"Generation waited {wait_seconds:g} s for {self._shut_by[-1]}, "
                    "which was never published.",
                    "A version is published only after every worker of every replica has verified.",
                    "Sync again, or restart the engine.",
                )
            if self._broken:
                raise NotServableError(
                    "The engine refuses to generate: its weights are half-written.",
                    self._broken,
                    "Sync again until a sync succeeds, or restart the engine.",
                )
            self._generating += 1
        try:
            yield
        finally:
            with self._changed:
                self._generating -= 1
                self._changed.notify_all()

    def start_sync(self, sync: GateSync, wait_seconds: float) -> None:
        """Holds new generations back for a sync that starts, and waits for the running ones.

        Raises:
            SyncTimeoutError: generations still ran after `wait_seconds`; the gate is as it was before.
        """
        with self._changed:
            self._hold(sync, len(self._shut_by), wait_seconds)

    def go_on(self, sync: GateSync, wait_seconds: float) -> None:
        """The same for a sync that started before and is about to write: another's end may have come between.

        Raises:
            SyncTimeoutError: as `start_sync`.
        """
        with self._changed:
            self._hold(sync, 0, wait_seconds)

    def shut(self, sync: GateSync) -> None:
        """Holds new generations back for a sync; the running ones are held by the engine's own pause."""
        with self._changed:
            if sync not in self._shut_by:
                self._shut_by.append(sync)

    def accepted(self, sync: GateSync) -> None:
        """Every worker took this sync, and so forgot any other: those that had shut the gate have ended."""
        with self._changed:
            if sync in self._shut_by:
                self._shut_by = [sync]

    def waits_for_another(self, sync: GateSync) -> bool:
        """Whether another sync than this one keeps the gate shut, so that this one's end decides nothing."""
        with self._changed:
            return any(other != sync for other in self._shut_by)

    def shut_by(self, sync: GateSync) -> bool:
        """Whether this sync has shut the gate and not ended."""
        with self._changed:
            return sync in self._shut_by

    def published(self, sync: GateSync) -> None:
        """Ends a sync whose weights are whole and published: generate, unless another has shut the gate."""
        with self._changed:
            self._broken = ""
            self._leave(sync)

    def failed(self, sync: GateSync, why_not_whole: str) -> None:
        """Ends a sync that was not published; `why_not_whole` is "" where every worker is as it was."""
        with self._changed:
            self._leave(sync)
            if not self._shut_by:
                self._broken = why_not_whole

    def withdrawn(self, sync: GateSync) -> None:
        """Ends a sync while another one keeps the gate shut and decides when it ends what the workers are."""
        with self._changed:
            self._leave(sync)

    def _hold(self, sync: GateSync, place: int, wait_seconds: float) -> None:
        new = sync not in self._shut_by
        if new:
            self._shut_by.insert(place, sync)
        ended = False
        try:
            ended = self._changed.wait_for(lambda: self._generating == 0, timeout=wait_seconds)
        finally:
            if not ended and new:
                self._leave(sync)
        if not ended:
            raise SyncTimeoutError(
                f"{sync} waited {wait_seconds:g} s for {self._generating} running generation(s).",
                "Weights are not written while the engine generates.",
                "Sync between generations, or allow more time.",
            )

    def _leave(self, sync: GateSync) -> None:
        self._shut_by = [other for other in self._shut_by if other != sync]
        self._changed.notify_all()
