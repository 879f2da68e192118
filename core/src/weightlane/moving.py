"""One rank's data path through a sync: iterate the export, feed the sinks, drain with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.contexts import StreamContext
    from weightlane.control import ControlChannel
    from weightlane.plan import LanePlan
    from weightlane.registry import Registry, Selected
    from weightlane.stream import ExportStream
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
        for layout, tensors in _planned(plan, stream):
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


def _planned(
    plan: LanePlan, stream: ExportStream
) -> Iterator[tuple[BucketLayout, Sequence[tuple[int, Tensor]]]]:
    """The stream's buckets beside the plan's layouts; a stream of another length is the trainer's error."""
    buckets = iter(stream)
    for layout in plan.buckets:
        tensors = next(buckets, None)
        if tensors is None:
            raise _wrong_length(plan, f"ended before bucket {layout.index}")
        yield layout, tensors
    # Asked for one more, a generator also runs to its end, where its clean-up is.
    if next(buckets, None) is not None:
        raise _wrong_length(plan, "did not end")


def _wrong_length(plan: LanePlan, what: str) -> ExportError:
    return ExportError(
        f"The export stream of {plan.trainer_backend} {what}; the plan has {len(plan.buckets)} buckets.",
        "A stream yields one item per planned bucket, on every rank.",
        "Report this to the plugin's authors.",
    )
