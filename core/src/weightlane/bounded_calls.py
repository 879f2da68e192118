"""Bounded calls of a client that has no bound of its own."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class BoundedCalls:
    """Runs calls one at a time in a thread of its own and waits at most `seconds` for each.

    A `TCPStore` client waits for an answer without end when its server is stopped or its host is gone, in a
    call that cannot be interrupted. Here the caller gets a TimeoutError, and the stuck thread, a daemon, is
    left behind.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._stuck = False
        self._calls: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, operation: Callable[[], _T]) -> _T:
        """The operation's result, or its own error.

        Raises:
            TimeoutError: no answer within the bound, now or in an earlier call.
        """
        call: _Call[_T] = _Call(operation)
        if not self._stuck:
            self._calls.put(call)  # type: ignore[arg-type]  # a queue of calls of any result
            self._stuck = not call.done.wait(self._seconds)
        if self._stuck:
            raise TimeoutError(f"no answer within {self._seconds:g} s")
        return call.result()  # bounded by the wait above: it is done

    def close(self) -> None:
        """Ends the thread after the calls that are waiting. Idempotent."""
        self._calls.put(None)

    def _work(self) -> None:
        # Not bounded by anything, and nobody waits for it: a daemon thread that idles until `close`.
        while (call := self._calls.get()) is not None:
            call.run()


class _Call(Generic[_T]):
    def __init__(self, operation: Callable[[], _T]) -> None:
        self._operation = operation
        self._results: list[_T] = []
        self._error: Exception | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._results.append(self._operation())
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, in another thread
            self._error = error
        finally:
            self.done.set()

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._results[0]
