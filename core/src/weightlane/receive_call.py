"""The long receive call of one replica, in a thread beside the gather on the ranks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from weightlane.errors import SyncTimeoutError
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.messages import ReceiveReport


class ReceiveCall:
    """Runs `call` at once; its result is asked for after the last bucket.

    Args:
        call: the call of every worker; its endpoint bounds it.
        on_failure: told at once of an error, from the thread.
    """

    def __init__(
        self, call: Callable[[], list[ReceiveReport]], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._reports: list[ReceiveReport] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

        def run() -> None:
            try:
                self._reports = call()
            except BaseException as error:  # noqa: BLE001 - it belongs to the main thread
                self._error = error
                on_failure(error)
            finally:
                self._done.set()

        threading.Thread(target=run, name="weightlane-receive", daemon=True).start()

    def ended(self, seconds: float) -> bool:
        """Whether the call ends within `seconds`."""
        return self._done.wait(seconds)

    def result(self, seconds: float, check: Callable[[], None], address: str) -> list[ReceiveReport]:
        """The reports, or the call's own error."""
        if not wait_until(self._done.is_set, seconds=seconds, check=check):
            raise SyncTimeoutError(
                f"{address} has not reported within {seconds:g} s of the last bucket.",
                "Its loader or post-processing still runs, or hangs.",
                "Raise Bounds.finish if it is that slow.",
            )
        if self._error is not None:
            raise self._error
        return self._reports
