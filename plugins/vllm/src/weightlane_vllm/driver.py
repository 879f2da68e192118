"""Bounded calls into a vLLM `LLM`: one thread makes them, the callers wait with a deadline and a watch.

`LLM` itself is not safe to call from several threads, and its client waits without bound: an engine core
that is killed leaves the caller of `collective_rpc` or `generate` waiting for ever. A timeout given to
`collective_rpc` is no remedy, since the late answer stays in vLLM's queue and is taken for that of the next
call.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, TypeVar

from weightlane.errors import EngineDeadError, EngineError, WeightlaneError
from weightlane_vllm.liveness import WatchedProcess, first_ended

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 1.0


class LlmDriver:
    """Runs functions over one `LLM` in one thread of its own.

    Args:
        llm: the engine. Its owner must not call it from another thread while a call of ours runs.
        name: how errors call the engine.
    """

    def __init__(self, llm: Any, *, name: str) -> None:
        self._llm = llm
        self._name = name
        self._watched: tuple[WatchedProcess, ...] = _engine_cores(llm)
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[Any], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._running = ""
        self._dead: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._work, name="weightlane-vllm", daemon=True)
        self._thread.start()

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid`: once it has ended, every call raises."""
        self._watched = (*self._watched, WatchedProcess(pid, what))

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process, once one has ended."""
        if self._dead is None:
            ended = first_ended(self._watched)
            if ended is None and _core_says_dead(self._llm):
                self._dead = EngineDeadError(
                    f"{self._name} is dead.", "vLLM's client reports that its engine core failed.", _FIX
                )
            elif ended is not None:
                self._dead = EngineDeadError(f"{self._name} is dead.", f"{ended.what} has ended.", _FIX)
        if self._dead is not None:
            raise self._dead

    def run(self, what: str, function: Callable[[Any], _T], timeout_seconds: float) -> _T:
        """Gives `function(llm)`, or raises within `timeout_seconds`.

        Raises:
            EngineDeadError: a process of the engine ended before or meanwhile.
            EngineError: vLLM raised (its text is carried), or the time is over.
        """
        self.require_alive()
        future: Future[_T] = Future()
        self._jobs.put((what, function, future))
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return future.result(timeout=_POLL_SECONDS)
            except WeightlaneError:
                raise
            except FutureTimeout as error:
                if future.done():
                    raise EngineError(f"{self._name} timed out in {what}.", f"{error}") from error
            except CancelledError:
                raise EngineError(f"{self._name} was closed before {what} ran.") from None
            except Exception as error:  # noqa: BLE001 - vLLM's own errors are of every type
                self._raise_engine_error(what, error)
            self.require_alive()
            if time.monotonic() > deadline:
                busy = self._running
                future.cancel()
                raise EngineError(
                    f"{self._name} did not finish {what} within {timeout_seconds:g} s.",
                    f"It is busy with {busy}." if busy else "",
                    "See the engine's log; if it hangs, end it and start it again.",
                )

    def close(self, *, end_processes: bool) -> None:
        """Ends our thread; with `end_processes` also whatever of the engine's processes still lives."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        for process in self._watched:
            if end_processes:
                process.kill()
            process.close()
        self._dead = self._dead or EngineDeadError(f"{self._name} was closed.")

    def _raise_engine_error(self, what: str, error: Exception) -> None:
        if type(error).__name__ == "EngineDeadError":
            time.sleep(_POLL_SECONDS)
            self.require_alive()
            self._dead = EngineDeadError(f"{self._name} died in {what}.", str(error), _FIX)
            raise self._dead from error
        self.require_alive()
        raise EngineError(f"{self._name} failed in {what}: {error}") from error

    def _work(self) -> None:
        # Not bounded by anything, and nobody waits for it: a daemon thread that idles until `close`.
        while (job := self._jobs.get()) is not None:
            what, function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            self._running = what
            try:
                future.set_result(function(self._llm))
            except BaseException as error:  # noqa: BLE001 - the caller waits for it in another thread
                future.set_exception(error)
            finally:
                self._running = ""


_FIX = (
    "See the engine's log above; start it again. The next sync takes it back where it is served at an "
    "address; an LLM object of this process needs a new lane."
)


def _engine_cores(llm: Any) -> tuple[WatchedProcess, ...]:
    """The engine-core processes that this process started; none when the engine runs in this process."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
    return tuple(
        WatchedProcess(process.pid, f"engine core process {process.pid} ({process.name})")
        for process in processes
    )


def _core_says_dead(llm: Any) -> bool:
    return bool(getattr(getattr(llm.llm_engine.engine_core, "resources", None), "engine_dead", False))
