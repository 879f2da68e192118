"""The gate between generation and syncs: nothing is generated from half-written weights.

It looks only at the kind of each agent message that passes. A sync starts with `Receive`, `BeginInline` or
`ReceiveDisk`: running generations end first, new ones wait, unless the message says that generation goes on
(an adapter is loaded beside the one that serves). `Publish` opens the gate. After a failure or a `Cancel` the
workers are asked whether they are servable; while one is not, generation is refused until a whole sync is
published.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from weightlane.errors import NotServableError, SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATE_WAIT_SECONDS = 60.0
"""How long a generation waits for a sync in progress before it is refused."""


class ServingGate:
    """Many generations or one sync. Thread-safe; every wait is bounded."""

    def __init__(self) -> None:
        # Bounded by what its holders do, which is to look and to notify; both waits on it have timeouts.
        self._changed = threading.Condition()
        self._state: Literal["serving", "writing", "broken"] = "serving"
        self._cause = ""
        self._generating = 0

    @contextmanager
    def generation(self, wait_seconds: float = GENERATE_WAIT_SECONDS) -> Iterator[None]:
        """Holds syncs back while a generation runs.

        Raises:
            NotServableError: a failed sync left a worker half-written, or a sync stays unpublished.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state != "writing", timeout=wait_seconds)
            if self._state == "writing":
                raise NotServableError(
                    f"Generation waited {wait_seconds:g} s for {self._cause}, which was never published.",
                    "A version is published only after every worker of every replica has verified.",
                    "Sync again, or restart the engine.",
                )
            if self._state == "broken":
                raise NotServableError(
                    "The engine refuses to generate: its weights are half-written.",
                    self._cause,
                    "Sync again until a sync succeeds, or restart the engine.",
                )
            self._generating += 1
        try:
            yield
        finally:
            with self._changed:
                self._generating -= 1
                self._changed.notify_all()

    def start_sync(self, what: str, wait_seconds: float) -> None:
        """Holds new generations back and waits for the running ones.

        Raises:
            SyncTimeoutError: generations still ran after `wait_seconds`; the gate is as it was before.
        """
        with self._changed:
            before = (self._state, self._cause)
            self._state, self._cause = "writing", what
            ended = False
            try:
                ended = self._changed.wait_for(lambda: self._generating == 0, timeout=wait_seconds)
            finally:
                if not ended:
                    self._state, self._cause = before
                    self._changed.notify_all()
            if not ended:
                raise SyncTimeoutError(
                    f"{what} waited {wait_seconds:g} s for {self._generating} running generation(s).",
                    "Weights are not written while the engine generates.",
                    "Sync between generations, or allow more time.",
                )

    def open(self) -> None:
        """The weights are whole and published: generate."""
        with self._changed:
            self._state, self._cause = "serving", ""
            self._changed.notify_all()

    def shut(self, cause: str) -> None:
        """A worker is half-written: refuse generation because of `cause`."""
        with self._changed:
            self._state, self._cause = "broken", cause
            self._changed.notify_all()

    @property
    def writing(self) -> bool:
        """Whether a sync has started and is neither published nor failed."""
        with self._changed:
            return self._state == "writing"
