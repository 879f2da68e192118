"""A trainer's export stream turned into the normal form of its adapter, bucket by bucket.

A trainer's plugin knows nothing of forms: it is given the adapter as it was trained, in buckets that each
hold what one planned bucket is made of, and what it yields is transformed on the way out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from weightlane.buckets import BucketEntry, BucketLayout, aligned, wire_nbytes
from weightlane.errors import ExportError
from weightlane.messages import WireTensor
from weightlane.peft.normal_form import transform, transforms
from weightlane.receiver import NameEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from torch import Tensor
    from typing_extensions import Self

    from weightlane.contexts import StreamContext
    from weightlane.hook_errors import GuardedStream
    from weightlane.peft.normal_form import TensorTransform


class _Places:
    """Which of the trainer's tensors each planned tensor is made of, and in which buckets they come."""

    def __init__(self, context: StreamContext) -> None:
        manifest = context.manifest
        trained, config = manifest.trained, manifest.adapter
        if trained is None or config is None:
            raise AssertionError("a manifest in normal form has the adapter that it was made of")
        changes = transforms(trained.adapter, trained.tensors, config, manifest.tensors)
        sent = [not entry.dropped for entry in context.entries]
        self.changes = [change for change, travels in zip(changes, sent, strict=True) if travels]
        used = {change.source for change in self.changes}
        self.specs = trained.tensors
        self.entries = tuple(
            NameEntry(
                spec.name,
                spec.name,
                spec.dtype,
                dropped="" if spec.name in used else "no tensor of the normal form is made of it",
            )
            for spec in self.specs
        )
        travelling = [spec for spec in self.specs if spec.name in used]
        self.tensors = tuple(WireTensor(spec.name, spec.shape, spec.dtype) for spec in travelling)
        self.numbers = {spec.name: number for number, spec in enumerate(travelling)}
        self.buckets = tuple(self._bucket(layout) for layout in context.buckets)

    def _bucket(self, planned: BucketLayout) -> BucketLayout:
        entries: list[BucketEntry] = []
        offset = 0
        for entry in planned.entries:
            source = self.changes[entry.tensor].source
            if source:
                number = self.numbers[source]
                nbytes = wire_nbytes(self.tensors[number])
                entries.append(BucketEntry(number, offset, nbytes))
                offset += aligned(nbytes)
        return changed(planned, nbytes=offset, entries=tuple(entries))


def as_trained(context: StreamContext) -> StreamContext:
    """The context that a trainer's plugin is given: the adapter as it holds it, in the plan's buckets.

    A planned bucket that is made of zeros alone is an empty one here.
    """
    trained = context.manifest.trained
    if trained is None:
        return context
    places = _Places(context)
    manifest = changed(context.manifest, tensors=trained.tensors, adapter=trained.adapter, trained=None)
    return replace(
        context, manifest=manifest, entries=places.entries, tensors=places.tensors, buckets=places.buckets
    )


class NormalFormStream:
    """The stream of a context in normal form, over the trainer's own.

    Args:
        stream: the plugin's, made for `as_trained(context)`.
        context: what the plan says.
    """

    def __init__(self, stream: GuardedStream, context: StreamContext) -> None:
        self._stream = stream
        self._wanted = context.wanted
        self._planned = context.buckets
        self._places = _Places(context)
        self.collective = stream.collective
        self.owns_storage = stream.owns_storage
        self.device = stream.device

    def onload(self) -> None:
        """The trainer's `onload`."""
        self._stream.onload()

    def offload(self) -> None:
        """The trainer's `offload`."""
        self._stream.offload()

    def __enter__(self) -> Self:
        """Enters the trainer's stream."""
        self._stream.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the trainer's stream."""
        self._stream.__exit__(exc_type, exc, traceback)

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        """One list a planned bucket, as the trainer's; empty on a rank that only drains."""
        # One more than is planned is passed on, so that whoever counts buckets counts the trainer's.
        for number, bucket in enumerate(self._stream):
            planned = self._planned[number].entries if number < len(self._planned) else ()
            yield self._made(dict(bucket), [entry.tensor for entry in planned]) if self._wanted else []

    def _made(self, held: dict[int, Tensor], numbers: Sequence[int]) -> list[tuple[int, Tensor]]:
        return [(number, self._one(self._places.changes[number], held)) for number in numbers]

    def _one(self, change: TensorTransform, held: dict[int, Tensor]) -> Tensor:
        if not change.source:
            return transform(change, None, device=self.device)
        source = held.get(self._places.numbers[change.source])
        if source is None:
            raise ExportError(
                f"The export stream yielded no {change.source} in its bucket.",
                "Each bucket of the plan holds what it lists.",
                "Report this to the trainer's plugin.",
            )
        return transform(change, source)
