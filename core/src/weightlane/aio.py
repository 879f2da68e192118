"""The lane for an event loop: the same calls, awaited, in a thread of the lane's own.

What cancelling an await means: `sync` and `stage` are decided at one point, when every worker of every
replica has verified. Cancelled before it, the sync fails on every rank with SyncCancelledError, nothing is
published, and receivers that had begun to write are fenced until a sync succeeds. Cancelled after it, the
call runs to its end: a version that is being published is never torn. Either way CancelledError is raised
once the call has ended, so that nothing runs on behind the caller's back, and `lane.state` says which it was.
A second cancellation does not wait for that end; the lane takes its next call when the first is through.

A call that is still queued keeps its turn when it is cancelled, since the other ranks make it too: a sync
or a stage begins and is given up at once, so that every rank hears of it and their next calls are the same
again.
The other calls cannot be given up: queued or running, they run to their end.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from weightlane.lane import Lane
    from weightlane.lane_messages import SyncReport
    from weightlane.residency import ReplicaResidency

# A call that has just begun has no sync to interrupt yet: looked for at once, then less and less often.
_FIRST_LOOK_SECONDS = 0.001
_LONGEST_LOOK_SECONDS = 0.05
_T = TypeVar("_T")


def _nothing() -> None:
    """Gives up nothing: what has to run to its end."""


class AsyncLane:
    """`lane.aio`. Some ranks may use it while others make the plain calls: what has to agree is their order.

    Calls made at once queue up, in the order in which they were awaited. The thread has the CUDA device that
    was current where `lane.aio` was first asked for, since each thread has its own.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        device = _cuda_device()
        # What runs in it is bounded by the lane's own bounds.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="weightlane-aio", initializer=_use_device, initargs=(device,)
        )

    async def sync(self, version: int) -> SyncReport:
        """`Lane.sync` without blocking the event loop."""
        return await self._sync_call(lambda: self._lane.sync(version))

    async def stage(self, version: int) -> SyncReport:
        """`Lane.stage` without blocking the event loop."""
        return await self._sync_call(lambda: self._lane.stage(version))

    async def commit(self) -> None:
        """`Lane.commit` without blocking the event loop; cancelled, it runs to its end."""
        await self._call(self._lane.commit)

    async def sleep(self) -> None:
        """`Lane.sleep` without blocking the event loop; cancelled, it runs to its end."""
        await self._call(self._lane.sleep)

    async def wake(self) -> None:
        """`Lane.wake` without blocking the event loop; cancelled, it runs to its end."""
        await self._call(self._lane.wake)

    async def residency(self, *, seconds: float = 10.0) -> list[ReplicaResidency]:
        """`Lane.residency`, also while a sync runs: it asks from a thread of its own."""
        return await asyncio.to_thread(lambda: self._lane.residency(seconds=seconds))

    async def close(self) -> None:
        """`Lane.close`, after the calls that are queued; interrupts none of them. Idempotent."""
        await self._call(self._lane.close)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(self, call: Callable[[], _T]) -> _T:
        return await self._waited_for(_Call(call))

    async def _sync_call(self, call: Callable[[], _T]) -> _T:
        made = _Call(call)
        return await self._waited_for(made, lambda: made.give_up(self._lane))

    async def _waited_for(self, call: _Call[_T], give_up: Callable[[], None] = _nothing) -> _T:
        waiting = asyncio.wrap_future(self._thread.submit(call.run), loop=asyncio.get_running_loop())
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            give_up()
            # Bounded by the lane's own bounds, which end this call and those queued before it.
            await asyncio.wait([waiting])
            _consume(waiting)
            raise


class _Call(Generic[_T]):
    """A call of the lane that has its turn on the lane's thread."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._begun = threading.Event()
        # Bounded by one `Lane.interrupt`, which the control channel's bounds end.
        self._lock = threading.Lock()
        self._ended = False

    def run(self) -> _T:
        self._begun.set()
        try:
            return self._context.run(self._call)
        finally:
            with self._lock:
                self._ended = True

    def give_up(self, lane: Lane) -> None:
        """Interrupts it once it has begun, or lets it end where it is too late for that; does not wait.

        In a thread of its own, because the event loop may be gone before the call has its turn.
        """
        threading.Thread(target=self._interrupt, args=(lane,), name="weightlane-give-up", daemon=True).start()

    def _interrupt(self, lane: Lane) -> None:
        # Bounded by the lane's own bounds, which end the calls before this one; the thread is a daemon.
        self._begun.wait()
        pause = _FIRST_LOOK_SECONDS
        while not self._is_interrupted(lane):
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_LOOK_SECONDS)

    def _is_interrupted(self, lane: Lane) -> bool:
        """True also where there is nothing left to interrupt."""
        # Held so that the call after this one, which begins when this has ended, is never interrupted.
        with self._lock:
            return self._ended or lane.interrupt("The task that awaited it was cancelled.")


def _consume(waiting: asyncio.Future[Any]) -> None:
    """Marks an error as seen: it is that of a call which the caller gave up, and in the lane's state."""
    if waiting.done() and not waiting.cancelled():
        waiting.exception()  # bounded by the look above: it is done


def _cuda_device() -> int | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def _use_device(device: int | None) -> None:
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
