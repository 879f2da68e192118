"""What no operator of a run shows: writes past torch, twins that are kept, memory that two targets share."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightlane.trace.geometry import extent
from weightlane.trace.recorder import storage_key
from weightlane.trace.table import Obstacle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.trace.recorder import Recorder
    from weightlane.trace.table import TracedTarget
    from weightlane.trace.targets import Target


def note_unseen_writes(targets: Sequence[Target], recorder: Recorder) -> None:
    """An obstacle for each twin with data that holds other values, though no operator wrote to it.

    Such as through the array that `numpy()` gives.
    """
    touched = {item.target for item in recorder.placements} | {fill.target for fill in recorder.fills}
    named = {name for item in recorder.obstacles for name in item.targets}
    for number, target in enumerate(targets):
        twin, model = target.twin.tensor, target.twin.model
        if twin.is_meta or model.is_meta or number in touched or target.names[0] in named:
            continue
        if not torch.equal(twin, model):
            recorder.block("computed", "", [], number, "through no operator of torch, as through numpy")


class KeptTwins:
    """Memory of twins that outlives their trace, because the loader keeps them or views of them.

    A later load would go into it without a word. So would one from a tensor without data that a loader made
    after a twin (`zeros_like`) and keeps, or into it.
    """

    def __init__(self, targets: Sequence[Target], made_without_data: Sequence[StorageWeakRef]) -> None:
        self._twins = [
            (item.names[0], weakref.ref(item.twin.tensor), _memory_of(item.twin.tensor)) for item in targets
        ]
        self._made = made_without_data

    def obstacles(self) -> tuple[Obstacle, ...]:
        """One for each; asked when nothing of ours holds a twin any more."""
        found = self._kept()
        if found:
            gc.collect()  # seldom, and an exception's frames may hold some
            found = self._kept()
        return found

    def _kept(self) -> tuple[Obstacle, ...]:
        what = "what stood for it during the trace, which the loader keeps"
        found = [
            Obstacle("foreign", "", (), (name,), what)
            for name, twin, memory in self._twins
            if twin() is not None or _is_there(memory)
        ]
        kept = sum(map(_is_there, self._made))
        if kept:
            what = f"{kept} tensors without data that it made during the trace and keeps"
            found.append(Obstacle("foreign", "", (), (), what))
        return tuple(found)


def _is_there(memory: StorageWeakRef) -> bool:
    return not memory.expired()  # type: ignore[no-untyped-call]


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def note_shared_memory(
    targets: Sequence[Target], described: Sequence[TracedTarget], recorder: Recorder
) -> None:
    """An obstacle for each pair of targets that were both written and lie in one memory as other dtypes.

    Those of one dtype have one storage number, and coverage counts each of their elements.
    """
    sources: dict[int, list[int]] = {item.target: [] for item in recorder.fills}
    for item in recorder.placements:
        sources.setdefault(item.target, []).append(item.source)
    spans: list[tuple[int, int, int, int]] = sorted(
        (*_span(target.twin.live), number)
        for number, target in enumerate(targets)
        if number in sources and target.twin.live is not None and described[number].form == "live"
    )
    reach = (-1, 0, 0, 0)  # the one before that ends last
    for span in spans:
        (memory, _, end, one), (own, start, _, other) = reach, span
        if memory == own and start < end and described[one].storage != described[other].storage:
            what = f"{described[other].name} lies in its memory as {described[other].dtype}"
            recorder.block("overwritten", "", sources[one] + sources[other], one, what)
        if memory != own or span[2] > end:
            reach = span


def _span(live: Tensor) -> tuple[int, int, int]:
    """Which memory, and from which byte to which; memory that was let go or is none is its storage's."""
    base = 0 if live.is_meta else live.untyped_storage().data_ptr()
    first = base + int(live.storage_offset()) * live.element_size()
    reach = extent(live.shape, live.stride()) * live.element_size()
    return (0 if base else storage_key(live)), first, first + reach
