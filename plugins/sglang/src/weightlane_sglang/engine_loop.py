"""Calls on the event loop of an `Engine`, from any thread but the loop's own.

That loop stands still between the calls of whoever owns the engine, and nobody else reads what its processes
answer. So whoever waits here runs it meanwhile, in short turns and one thread at a time; where it runs
already, its owner's thread or program does that. Nothing runs it when nobody waits: SGLang refuses a call of
its owner's on a loop that runs in another thread ("this event loop is already running").
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from weightlane.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_TURN_SECONDS = 0.5
_POLL_SECONDS = 0.02
_T = TypeVar("_T")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Lock] = WeakKeyDictionary()
_turns_change = Lock()  # bounded by one look at the dictionary


class EngineLoop:
    """Runs coroutines there.

    Args:
        loop: gives the loop; asked anew for each call, since SGLang settles on one with its first request.
        name: how errors call the engine.
        check: raises what ends a wait before its bound.
    """

    def __init__(
        self, loop: Callable[[], asyncio.AbstractEventLoop], *, name: str, check: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._name = name
        self._check = check

    def start(self, what: str, make: Callable[[], Coroutine[Any, Any, _T]]) -> OnLoop[_T]:
        """Has the loop begin `make()`; it goes on when somebody runs the loop.

        Raises:
            EngineError: this thread could never wait for it: it runs a loop itself. Or the loop is closed.
        """
        loop = self._loop()
        self._require_not_inside(what, loop)
        coroutine = make()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise self._broken(what, error) from error
        return OnLoop(self, what, loop, future)

    def turn(self, what: str, loop: asyncio.AbstractEventLoop, future: Future[Any], seconds: float) -> None:
        """Waits for `future` at most `seconds`, and runs the loop where nobody does.

        Raises:
            EngineError: the loop cannot be run; and what `check` raises.
        """
        self._check()
        turn = _turn_of(loop)
        if loop.is_running() or not turn.acquire(blocking=False):
            wait([future], min(seconds, _POLL_SECONDS))
            return
        try:
            ended = _ended(future, min(seconds, _TURN_SECONDS))
            try:
                loop.run_until_complete(ended)
            except RuntimeError as error:
                ended.close()
                if not loop.is_running():  # else its owner was quicker
                    raise self._broken(what, error) from error
        finally:
            turn.release()

    def _require_not_inside(self, what: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is loop or not loop.is_running():
            raise EngineError(
                f"{what} of {self._name} was asked for inside a coroutine.",
                "It would wait there for what the event loop of this very thread has to do.",
                "Await lane.aio, which works in a thread, or call from another thread.",
            )

    def _broken(self, what: str, error: RuntimeError) -> EngineError:
        return EngineError(
            f"{what} cannot be run on the event loop of {self._name}: {error}.",
            "An engine answers on the one event loop that it was first used with.",
            "Close the lane before that loop is closed, and make a new engine for another loop.",
        )


class OnLoop(Generic[_T]):
    """One call that the loop has been given. It is never cancelled: as over HTTP, SGLang goes on with it."""

    def __init__(
        self, owner: EngineLoop, what: str, loop: asyncio.AbstractEventLoop, future: Future[_T]
    ) -> None:
        self._owner = owner
        self._what = what
        self._loop = loop
        self._future = future

    def wait(self, seconds: float) -> bool:
        """Whether it has ended well within `seconds`; raises its error.

        Raises:
            EngineError: its loop was ended; and what the call or `check` raises.
        """
        deadline = time.monotonic() + seconds
        while not self._future.done() and (left := deadline - time.monotonic()) > 0:
            self._owner.turn(self._what, self._loop, self._future, left)
        if not self._future.done():
            return False
        self.value()
        return True

    def value(self) -> _T:
        """What it gave, once it has ended."""
        try:
            return self._future.result(0)
        except CancelledError as error:
            raise EngineError(
                f"{self._what} was cancelled: the event loop of the engine was ended.",
                "Its owner ended it, or the program that it belongs to.",
            ) from error


def _turn_of(loop: asyncio.AbstractEventLoop) -> Lock:
    """One lock per loop: engines made in one thread may share a loop, and lanes an engine."""
    with _turns_change:
        return _turns.setdefault(loop, Lock())  # bounded by `turn`, which never waits for it


async def _ended(future: Future[Any], seconds: float) -> None:
    """Returns when `future` has ended, or `seconds` later; its error stays with whoever waits for it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # a loop that is closed by then has nobody to wake
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)  # bounded by `wait_for`
