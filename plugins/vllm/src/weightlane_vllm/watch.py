"""One engine's signs of life, and the bounded wait for an answer of it that ends as soon as it is dead."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, TypeVar

from weightlane.errors import EngineDeadError, EngineError, WeightlaneError
from weightlane.watched_process import WatchedProcess, first_ended

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_POLL_SECONDS = 0.1


class EngineWatch:
    """The processes of one engine, and what its client says of them.

    Args:
        core: vLLM's client of the engine core (`LLMEngine.engine_core`, `AsyncLLM.engine_core`).
        name: how errors call the engine.
    """

    def __init__(self, core: Any, *, name: str) -> None:
        self._core = core
        self.name = name
        self._watched: tuple[WatchedProcess, ...] = _engine_cores(core)
        self._dead: EngineDeadError | None = None

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid`: once it has ended, every call raises."""
        self._watched = (*self._watched, WatchedProcess(pid, what))

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process, once one has ended."""
        if self._dead is None:
            ended = first_ended(self._watched)
            if ended is None and _core_says_dead(self._core):
                self._dead = EngineDeadError(
                    f"{self.name} is dead.", "vLLM's client reports that its engine core failed.", _FIX
                )
            elif ended is not None:
                self._dead = EngineDeadError(f"{self.name} is dead.", f"{ended.what} has ended.", _FIX)
        if self._dead is not None:
            raise self._dead

    def wait(self, what: str, future: Future[_T], timeout_seconds: float, busy: Callable[[], str]) -> _T:
        """The result of `future`, or an error within `timeout_seconds`; `busy` says what the engine is at.

        Raises:
            EngineDeadError: a process of the engine ended meanwhile.
            EngineError: vLLM raised (its text is carried), or the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return future.result(timeout=_POLL_SECONDS)
            except WeightlaneError:
                raise
            except FutureTimeout as error:
                if future.done():
                    raise EngineError(f"{self.name} timed out in {what}.", f"{error}") from error
            except CancelledError:
                raise EngineError(f"{self.name} was closed before {what} ran.") from None
            except Exception as error:  # noqa: BLE001 - vLLM's own errors are of every type
                self._raise_engine_error(what, error)
            try:
                self.require_alive()
            except EngineDeadError:
                future.cancel()
                raise
            if time.monotonic() > deadline:
                at = busy()
                future.cancel()
                raise EngineError(
                    f"{self.name} did not finish {what} within {timeout_seconds:g} s.",
                    f"It is busy with {at}." if at else "",
                    "See the engine's log; if it hangs, end it and start it again.",
                )

    def close(self, *, end_processes: bool) -> None:
        """Lets go of the processes; with `end_processes` those that still live are killed."""
        for process in self._watched:
            if end_processes:
                process.kill()
            process.close()
        self._dead = self._dead or EngineDeadError(f"{self.name} was closed.")

    def _raise_engine_error(self, what: str, error: Exception) -> None:
        if type(error).__name__ == "EngineDeadError":
            time.sleep(_POLL_SECONDS)
            self.require_alive()
            self._dead = EngineDeadError(f"{self.name} died in {what}.", str(error), _FIX)
            raise self._dead from error
        self.require_alive()
        raise EngineError(f"{self.name} failed in {what}: {error}") from error


_FIX = (
    "See the engine's log above; start it again. The next sync takes it back where it is served at an "
    "address; an engine object of this process needs a new lane."
)


def _engine_cores(core: Any) -> tuple[WatchedProcess, ...]:
    """The engine-core processes that this process started; none when the engine runs in this process."""
    resources = getattr(core, "resources", None)
    processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
    return tuple(
        WatchedProcess(process.pid, f"engine core process {process.pid} ({process.name})")
        for process in processes
    )


def _core_says_dead(core: Any) -> bool:
    return bool(getattr(getattr(core, "resources", None), "engine_dead", False))
