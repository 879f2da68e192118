"""The lane for an event loop: the same calls, awaited, in a thread of the lane's own.

What cancelling an await means: `sync` and `stage` are decided at one point, when every worker of every
replica has verified. Cancelled before it, the sync fails on every rank with SyncCancelledError, nothing is
published, and receivers that had begun to write are fenced until a sync succeeds. Cancelled after it, the
call runs to its end: a version that is being published is never torn. Either way CancelledError is raised
once the call has ended, so that nothing runs on behind the caller's back, and `lane.state` says which it was.
A second cancellation does not wait for that end; the lane takes its next call when the first is through.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from weightlane.lane import Lane
    from weightlane.lane_messages import SyncReport
    from weightlane.residency import ReplicaResidency

_LOOK_SECONDS = 0.05  # a call that has just begun has no sync to interrupt yet
_T = TypeVar("_T")


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
        return await self._call(lambda: self._lane.sync(version))

    async def stage(self, version: int) -> SyncReport:
        """`Lane.stage` without blocking the event loop."""
        return await self._call(lambda: self._lane.stage(version))

    async def commit(self) -> None:
        """`Lane.commit` without blocking the event loop; once begun, it runs to its end."""
        await self._call(self._lane.commit)

    async def sleep(self) -> None:
        """`Lane.sleep` without blocking the event loop; once begun, it runs to its end."""
        await self._call(self._lane.sleep)

    async def wake(self) -> None:
        """`Lane.wake` without blocking the event loop; once begun, it runs to its end."""
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
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        future = self._thread.submit(lambda: context.run(call))
        waiting = asyncio.wrap_future(future, loop=loop)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if future.cancel():  # it had not begun
                raise
            await self._end(waiting)
            raise

    async def _end(self, waiting: asyncio.Future[Any]) -> None:
        """Interrupts the running call, or lets it end where it is too late for that."""
        while not waiting.done():
            # Not on the loop's own thread: the control channel answers within a bound, but not at once.
            # The waits are bounded by the lane's own bounds, which end the call that runs.
            if await asyncio.to_thread(self._lane.interrupt, "The task that awaited it was cancelled."):
                await asyncio.wait([waiting])
            await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        _consume(waiting)


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
