"""The trainer's memory around the move: loaded before the first bucket, offloaded after the last."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from weightlane.lane_messages import Go
from weightlane.stream import MovesMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.program import TrainerLifecycle
    from weightlane.stream import ExportStream


@contextmanager
def loaded(
    stream: ExportStream, lifecycle: TrainerLifecycle, agree: Callable[[Callable[[], Go]], None]
) -> Iterator[None]:
    """Inside, this rank and all others have loaded what they export; afterwards it is offloaded, always.

    Args:
        stream: this sync's stream, entered.
        lifecycle: what the trainer backend planned; an empty one makes this do nothing.
        agree: does this rank's load and returns once every rank has done its own, or raises on all.
    """
    if not (lifecycle.onload or lifecycle.offload):
        yield
        return
    if not isinstance(stream, MovesMemory):
        raise TypeError("a stream of the registry is one, and blames a plugin whose own is not")

    def load() -> Go:
        stream.onload()
        return Go()

    try:
        if lifecycle.onload:
            agree(load)
        yield
    except BaseException:
        if lifecycle.offload:
            # What failed first is what is told; an offload that fails after it is most often its echo.
            with suppress(Exception):
                stream.offload()
        raise
    if lifecycle.offload:
        stream.offload()
