"""A call in a thread of its own, beside whoever waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from weightlane.errors import SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Beside(Generic[_T]):
    """A call that runs in a thread; `check` raises what it raised, as soon as it has."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._values: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            self._error = error

    def check(self) -> None:
        """Raises the call's error, if it has ended with one."""
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended well within `seconds`; raises its error."""
        self._thread.join(seconds)
        self.check()
        return not self._thread.is_alive()

    def value(self, what: str, seconds: float) -> _T:
        """What the call gave.

        Raises:
            SyncTimeoutError: it has not ended within `seconds`.
        """
        if not self.wait(seconds):
            raise SyncTimeoutError(f"{what} did not end within {seconds:.0f} s.")
        return self._values[0]
