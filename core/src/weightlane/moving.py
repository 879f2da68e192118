"""One rank's data path through a sync: iterate the export, feed the sinks, drain with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.contexts import StreamContext
    from weightlane.control import ControlChannel
    from weightlane.plan import LanePlan
    from weightlane.registry import Registry, Selected
    from weightlane.transports.shm import ShmSink
    from weightlane.transports.sink import Sink, SinkBounds


@dataclass(frozen=True, slots=True)
class Mover:
    """What a rank needs to move: the selected trainer backend, its stream context and its sinks."""

    registry: Registry
    selected: Selected
    stream: StreamContext
    sinks: tuple[Sink, ...]
    rings: tuple[ShmSink, ...]
    channel: ControlChannel

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Tells every receiver that this rank feeds.

        Without `sync`, it is about the sync that `move_buckets` was last called for. A rank that fails before
        it gets there must name it: the worker may be waiting in its ring already.
        """
        for sink in self.sinks:
            sink.abort(cause, sync=sync)

    def close(self) -> None:
        """Stops beating for the rings, then frees all sinks."""
        for ring in self.rings:
            self.channel.off_beat(ring.beat)
        for sink in self.sinks:
            sink.close()


def move_buckets(
    mover: Mover,
    plan: LanePlan,
    sync: int,
    version: int,
    bounds: SinkBounds,
    moved: Callable[[int], None],
) -> str:
    """Moves one sync's buckets from this rank; gives the digest of what it sent ("" when it only drained).

    When a sink fails and the stream is collective, the rank goes on iterating without sending, so that no
    other rank is left alone in a collective (invariant 6), and raises at the end.
    """
    failed: Exception | None = None
    stream = mover.registry.call_export_params(mover.selected, mover.stream)
    with stream:
        try:
            for sink in mover.sinks:
                sink.begin(sync, version, bounds)
        except Exception as error:
            if not stream.collective:
                raise
            failed = error
            mover.abort(str(error), sync=sync)
        for layout, tensors in zip(plan.buckets, stream, strict=True):
            if failed is not None:
                continue
            try:
                if not mover.sinks:
                    bounds.check()
                for sink in mover.sinks:
                    sink.put(layout, tensors)
                moved(layout.nbytes)
            except Exception as error:
                if not stream.collective:
                    raise
                failed = error
                mover.abort(str(error), sync=sync)
    if failed is not None:
        raise failed
    digests = [sink.finish() for sink in mover.sinks]
    return next((digest for digest in digests if digest), "")
