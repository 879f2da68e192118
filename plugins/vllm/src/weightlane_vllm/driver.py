"""Bounded calls into a vLLM `LLM`: one thread makes them, the callers wait with a deadline and a watch.

`LLM` itself is not safe to call from several threads, and its client waits without bound: an engine core
that is killed leaves the caller of `collective_rpc` or `generate` waiting for ever. A timeout given to
`collective_rpc` is no remedy, since the late answer stays in vLLM's queue and is taken for that of the next
call.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from weightlane_vllm.watch import EngineWatch

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_CLOSE_SECONDS = 1.0


class LlmDriver:
    """Runs functions over one `LLM` in one thread of its own.

    Args:
        llm: the engine. Its owner must not call it from another thread while a call of ours runs.
        name: how errors call the engine.
    """

    def __init__(self, llm: Any, *, name: str) -> None:
        self._llm = llm
        self._watch = EngineWatch(llm.llm_engine.engine_core, name=name)
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[Any], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._running = ""
        self._thread = threading.Thread(target=self._work, name="weightlane-vllm", daemon=True)
        self._thread.start()

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid`: once it has ended, every call raises."""
        self._watch.watch(pid, what)

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process, once one has ended."""
        self._watch.require_alive()

    def run(self, what: str, function: Callable[[Any], _T], timeout_seconds: float) -> _T:
        """Gives `function(llm)`, or raises within `timeout_seconds`.

        Raises:
            EngineDeadError: a process of the engine ended before or meanwhile.
            EngineError: vLLM raised (its text is carried), or the time is over.
        """
        self.require_alive()
        future: Future[_T] = Future()
        self._jobs.put((what, function, future))
        return self._watch.wait(what, future, timeout_seconds, lambda: self._running)

    def close(self, *, end_processes: bool) -> None:
        """Ends our thread; with `end_processes` also whatever of the engine's processes still lives."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._watch.close(end_processes=end_processes)

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
