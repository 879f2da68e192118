"""One rank's data path through a sync: iterate the export, feed the sinks, drain with the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.contexts import StreamContext
    from weightlane.control import ControlChannel
    from weightlane.plan import LanePlan
    from weightlane.registry import Registry, Selected
    from weightlane.stream import ExportStream
    from weightlane.transports.disk import DiskSink
    from weightlane.transports.ring_sink import RingSink
    from weightlane.transports.sink import Sink, SinkBounds


ALL_REPLICAS = -1
"""In `Mover.replicas`: a sink that feeds every replica of its transport, such as the lane's folder."""


@dataclass(frozen=True, slots=True)
class Mover:
    """What a rank needs to move: the selected trainer backend, its stream context and its sinks.

    `replicas` tells, per sink, the replica that it feeds; `rings` are those of the sinks that beat.
    """

    registry: Registry
    selected: Selected
    stream: StreamContext
    sinks: tuple[Sink, ...]
    rings: tuple[RingSink, ...]
    channel: ControlChannel
    folder: DiskSink | None = None
    replicas: tuple[int, ...] = ()

    def open_stream(self, check: Callable[[], None] | None = None) -> ExportStream:
        """This sync's stream, not entered yet; `check` ends its waits when another rank failed."""
        stream = replace(self.stream, check=check) if check else self.stream
        return self.registry.call_export_params(self.selected, stream)

    def without(self, replicas: Collection[int]) -> Mover:
        """For one sync: only the sinks of other replicas."""
        if not replicas:
            return self
        kept = [
            (sink, number)
            for sink, number in zip(self.sinks, self.replicas, strict=True)
            if number not in replicas
        ]
        return replace(
            self, sinks=tuple(sink for sink, _ in kept), replicas=tuple(number for _, number in kept)
        )

    def exchanging(self, replicas: Collection[int], new: Sequence[tuple[int, Sink]]) -> Mover:
        """For good: the sinks of `replicas` are closed and `new` ones, each with its replica, stand in."""
        from weightlane.transports.ring_sink import RingSink

        for ring in self.rings:
            if ring.replica in replicas:
                self.channel.off_beat(ring.beat)
        for sink, number in zip(self.sinks, self.replicas, strict=True):
            if number in replicas:
                sink.close()
        kept = self.without(replicas)
        rings = tuple(ring for ring in self.rings if ring.replica not in replicas)
        return replace(
            kept,
            sinks=(*kept.sinks, *(sink for _, sink in new)),
            replicas=(*kept.replicas, *(number for number, _ in new)),
            rings=(*rings, *(sink for _, sink in new if isinstance(sink, RingSink))),
        )

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Tells every receiver that this rank feeds.

        Without `sync`, it is about the sync that `move_buckets` was last called for. A rank that fails before
        it gets there must name it: the worker may be waiting in its ring already.
        """
        for sink in self.sinks:
            sink.abort(cause, sync=sync)

    def published(self, sync: int) -> None:
        """Every replica serves what `sync` moved."""
        if self.folder is not None:
            self.folder.published(sync)

    def close(self) -> None:
        """Stops beating for the rings, then frees all sinks."""
        for ring in self.rings:
            self.channel.off_beat(ring.beat)
        for sink in self.sinks:
            sink.close()


@dataclass(frozen=True, slots=True)
class Moved:
    """How a rank came through a stream that it iterated to its end.

    `digest` is over what it sent ("" when it only drained); `failure` is what kept it from sending.
    """

    digest: str
    failure: Exception | None = None


def move_buckets(
    mover: Mover,
    stream: ExportStream,
    plan: LanePlan,
    sync: int,
    version: int,
    bounds: SinkBounds,
    moved: Callable[[int], None],
) -> Moved:
    """Moves one sync's buckets from this rank.

    When a sink fails and the stream is collective, the rank goes on iterating without sending, so that no
    other rank is left alone in a collective (invariant 6), and tells the failure at the end. An error of the
    stream itself, or of a sink where nothing is collective, is raised at once.
    """
    failed: Exception | None = None
    try:
        for sink in mover.sinks:
            sink.begin(sync, version, bounds)
    except Exception as error:  # noqa: BLE001 - kept for the end of the stream, whatever it is
        failed = _noted(mover, stream, error, sync)
    for layout, tensors in _planned(plan, stream):
        if failed is not None:
            continue
        try:
            bounds.check()
            for sink in mover.sinks:
                sink.put(layout, tensors)
            moved(layout.nbytes)
        except Exception as error:  # noqa: BLE001 - kept for the end of the stream, whatever it is
            failed = _noted(mover, stream, error, sync)
    if failed is not None:
        return Moved("", failed)
    digests = [sink.finish() for sink in mover.sinks]
    return Moved(next((digest for digest in digests if digest), ""))


def _noted(mover: Mover, stream: ExportStream, error: Exception, sync: int) -> Exception:
    """The error, for the end of a collective stream; raised where no other rank waits for this one."""
    if not stream.collective:
        raise error
    mover.abort(str(error), sync=sync)
    return error


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
