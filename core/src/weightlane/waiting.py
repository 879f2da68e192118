"""Bounded waiting: every loop that waits for another process goes through here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SPINS = 200
_FIRST_SLEEP = 0.0002
_LONGEST_SLEEP = 0.005
_CHECK_EVERY = 0.05


def nothing_to_check() -> None:
    """The check of a wait that nobody can abort."""


def wait_until(
    condition: Callable[[], bool],
    *,
    seconds: float,
    check: Callable[[], None] = nothing_to_check,
    longest_sleep: float = _LONGEST_SLEEP,
) -> bool:
    """Polls `condition` for at most `seconds`; False when the bound is reached.

    `check` runs about every 50 ms and may raise to end the wait (an abort, a lost peer).
    """
    deadline = time.monotonic() + seconds
    next_check = 0.0
    pause = _FIRST_SLEEP
    spins = 0
    while not condition():
        now = time.monotonic()
        if now >= next_check:
            check()
            next_check = now + _CHECK_EVERY
        if now >= deadline:
            return condition()
        if spins < _SPINS:
            spins += 1
            time.sleep(0)
            continue
        time.sleep(min(pause, longest_sleep, max(0.0, deadline - now)))
        pause = min(pause * 1.5, longest_sleep)
    return True


class Liveness:
    """Tells how long a counter written by another process has stood still.

    Compares values seen here with this process's own clock, so the two processes need no common clock.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._value = read()
        self._since = time.monotonic()

    def silent_seconds(self) -> float:
        """Seconds since the counter was last seen to change."""
        value = self._read()
        now = time.monotonic()
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since

    def restart(self) -> None:
        """Starts counting anew, for a peer that was not expected to beat until now."""
        self._value = self._read()
        self._since = time.monotonic()
