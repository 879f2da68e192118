"""The open connections of a front, and which of them makes room when there are too many."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Guests:
    """Knows of each connection whether a request of it is being answered. Thread-safe.

    A connection that is being answered is never dropped; any other is somebody who has not said yet what they
    want, which takes an honest caller milliseconds. So whoever opens connections and stalls keeps nobody out.

    Args:
        most: how many connections there may be at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Bounded by what its holders do: to look into a dict and to shut a socket.
        self._lock = threading.Lock()
        self._waiting: dict[int, None] = {}  # by descriptor, the oldest first
        self._answered: set[int] = set()

    def admit(self, descriptor: int) -> bool:
        """Whether there is room; the oldest connection that is not being answered may go for it."""
        with self._lock:
            if len(self._waiting) + len(self._answered) >= self._most:
                if not self._waiting:
                    return False
                self._drop(next(iter(self._waiting)))
            self._waiting[descriptor] = None
            return True

    @contextmanager
    def answering(self, descriptor: int) -> Iterator[None]:
        """Keeps the connection while its request is answered.

        Raises:
            ConnectionAbortedError: it has been dropped.
        """
        with self._lock:
            if descriptor not in self._waiting:
                raise ConnectionAbortedError("dropped to make room")
            del self._waiting[descriptor]
            self._answered.add(descriptor)
        try:
            yield
        finally:
            with self._lock:
                self._answered.discard(descriptor)
                self._waiting[descriptor] = None

    def leave(self, descriptor: int) -> None:
        """Forgets the connection. Comes before its descriptor is closed, whose number is then given anew."""
        with self._lock:
            self._waiting.pop(descriptor, None)

    def _drop(self, descriptor: int) -> None:
        del self._waiting[descriptor]
        # Its thread reads the end and closes it; here only the talk is ended.
        borrowed = socket.socket(fileno=descriptor)
        with contextlib.suppress(OSError):
            borrowed.shutdown(socket.SHUT_RDWR)
        borrowed.detach()
