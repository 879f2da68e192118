"""One message at a time on a worker, and no wait for one's turn without an end."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightlane.errors import SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUSY_SECONDS = 900.0
"""Longer than one sync of a large model takes to load; whoever asked has given up long before."""


class Turns:
    """Whose turn it is; a loader that hangs must not gather waiting threads without end.

    Args:
        origin: how the worker names itself in errors.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        # Every wait for it is bounded by _BUSY_SECONDS.
        self._lock = threading.Lock()
        self._doing = ""

    @contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Runs the block alone; raises SyncTimeoutError with what it waited for when the turn never comes."""
        if not self._lock.acquire(timeout=_BUSY_SECONDS):
            raise SyncTimeoutError(
                f"{self._origin} did not take {what} within {_BUSY_SECONDS:g} s.",
                f"It is still at {self._doing}.",
                "Its loader hangs, or one sync takes longer than that; look at the engine's log.",
            )
        self._doing = what
        try:
            yield
        finally:
            self._lock.release()
