"""A thread with an event loop in it, for a program that has none and wants an `AsyncLLM`."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

_T = TypeVar("_T")
_START_SECONDS = 10.0
_CLOSE_SECONDS = 5.0


class LoopThread:
    """An event loop that runs in a daemon thread from construction to `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.loop.call_soon(started.set)
        self._thread = threading.Thread(target=self._run, name="weightlane-vllm-loop", daemon=True)
        self._thread.start()
        started.wait(_START_SECONDS)

    def call(self, function: Callable[[], _T], seconds: float) -> _T:
        """`function()` in the loop's thread, such as `lambda: AsyncLLM.from_engine_args(arguments)`.

        Raises:
            TimeoutError: it had not ended within `seconds`.
        """

        async def called() -> _T:
            return function()

        return self.run(called(), seconds)

    def run(self, coroutine: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """What a coroutine gives that runs on the loop.

        Raises:
            TimeoutError: it had not ended within `seconds`; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what still runs and ends the loop. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        # Not bounded by anything: a daemon thread that serves until `close`.
        self.loop.run_forever()
        self.loop.close()

    def _end(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        gathered.add_done_callback(lambda _: self.loop.stop())
