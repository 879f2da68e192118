"""Bounded calls into a vLLM `AsyncLLM`: coroutines on the engine's own event loop, awaited from any thread.

The loop is the owner's and stays that. An answer that comes late is nobody's: vLLM's asynchronous client
numbers its calls, unlike that of `LLM`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from weightlane.errors import EngineError
from weightlane_vllm.watch import EngineWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_T = TypeVar("_T")


class AsyncDriver:
    """Runs coroutines over one `AsyncLLM` on its loop; thread-safe, any number at once.

    Args:
        engine: the `AsyncLLM`, made while its loop ran.
        name: how errors call the engine.

    Raises:
        EngineError: the engine has no event loop yet, or its loop has ended.
    """

    def __init__(self, engine: Any, *, name: str) -> None:
        self._engine = engine
        self._watch = EngineWatch(engine.engine_core, name=name)
        self._loop = _loop_of(engine, name)
        self._running: dict[int, str] = {}

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid`: once it has ended, every call raises."""
        self._watch.watch(pid, what)

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process once one has ended, EngineError once the loop has."""
        self._watch.require_alive()
        if self._loop.is_closed() or not self._loop.is_running():
            raise EngineError(
                f"{self._watch.name} has no running event loop any more.",
                "Its calls and its requests run there.",
                "Keep the loop running for as long as the engine is used.",
            )

    def run(self, what: str, make: Callable[[Any], Coroutine[Any, Any, _T]], timeout_seconds: float) -> _T:
        """Gives what the coroutine `make(engine)` gives, or raises within `timeout_seconds`.

        Raises:
            EngineDeadError: a process of the engine ended before or meanwhile.
            EngineError: vLLM raised (its text is carried), the time is over (the coroutine is cancelled), or
                the caller is the loop's own thread, which would wait for itself.
        """
        self.require_alive()
        self._require_another_thread(what)
        future = asyncio.run_coroutine_threadsafe(make(self._engine), self._loop)
        number = id(future)
        self._running[number] = what
        try:
            return self._watch.wait(what, future, timeout_seconds, lambda: self._others(number))
        finally:
            del self._running[number]

    def close(self, *, end_processes: bool) -> None:
        """Lets go of the engine; with `end_processes` what still lives of its processes is killed."""
        self._watch.close(end_processes=end_processes)

    def _others(self, number: int) -> str:
        return ", ".join(what for other, what in tuple(self._running.items()) if other != number)

    def _require_another_thread(self, what: str) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return
        if here is self._loop:
            raise EngineError(
                f"{self._watch.name} was to be asked for {what} from the thread of its own event loop.",
                "The answer comes through that loop, so the wait for it would never end.",
                "Use await lane.aio.sync(...), and await asyncio.to_thread(...) around connect.",
            )


def _loop_of(engine: Any, name: str) -> asyncio.AbstractEventLoop:
    """The loop on which the engine handles its outputs; an `AsyncLLM` takes it up where it is first used."""
    handler: asyncio.Task[Any] | None = engine.output_handler
    if handler is None:
        raise EngineError(
            f"{name} has no event loop yet.",
            "An AsyncLLM that was made outside of a running loop has one only from its first request on.",
            "Make it within a running loop (in a coroutine, or with weightlane_vllm.loop_thread.LoopThread).",
        )
    return handler.get_loop()
