"""The stream: bucket by bucket, sources gathered, tensors made; never a whole model beside the shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightlane.errors import ExportError
from weightlane.export.rounding import RoundingLoss
from weightlane.torch_trainer.adapter import require_scales
from weightlane.torch_trainer.announced import require_as_announced
from weightlane.torch_trainer.unchanged import moved
from weightlane_fsdp.collectives import Collectives
from weightlane_fsdp.describe import aliases_of
from weightlane_fsdp.export import read_export
from weightlane_fsdp.gathering import SMALL, Gathering
from weightlane_fsdp.replicas import from_first_rank, require_equal
from weightlane_fsdp.tree import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.contexts import StreamContext
    from weightlane.export.recipe import Recipe
    from weightlane.stream import ExportStream
    from weightlane_fsdp.export import Export
    from weightlane_fsdp.held import Held


class FsdpStream:
    """Yields the plan's buckets of tensors that are in storage of their own.

    A bucket's list is emptied when the next is asked for, so that one bucket at a time is alive; a tensor
    taken from it stays valid. Live parameters are only read: there is nothing to restore.
    """

    owns_storage = False

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self.collective = context.manifest.collective
        self.device = "cpu"
        self._export: Export | None = None
        self._staged: dict[str, Tensor] = {}
        self._cache: dict[str, Tensor] = {}
        self._loss = RoundingLoss()

    @property
    def update_lost(self) -> float | None:
        """The share of the adapters' change that rounding took from what was merged here; None before any."""
        return self._loss.update_lost

    def __enter__(self) -> ExportStream:
        export = read_export(self._context.export)
        require_as_announced(
            self._context.manifest,
            self._context.entries,
            {item.name: item for item in export.recipes},
            lambda: aliases_of(export),
            rank=self._context.export.rank,
        )
        if self._context.manifest.adapter is not None:
            require_scales(unwrapped(self._context.export.model), self._context.manifest.adapter)
        self._export = export
        self._loss = RoundingLoss()
        self.device = str(export.device)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._export = None
        self._cache.clear()
        self._staged.clear()

    def onload(self) -> None:
        """Copies parts to the GPU; what FSDP's own policy keeps on the CPU stays there, as was asked."""
        export = self._entered()
        for item in export.used:
            if item.part.device != export.device and not item.owned_offload:
                self._staged[item.source.key] = item.part.to(export.device, item.dtype)

    def offload(self) -> None:
        """Drops the copies; the trainer's own parameters were never moved."""
        self._staged.clear()

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        """One list of (index into the plan's tensors, tensor) a bucket; empty on a rank that only drains."""
        export = self._entered()
        making = _Making(export, self._context, self._staged, self._cache)
        making.agree()
        for layout in self._context.buckets:
            with self._loss.measured():
                bucket = making.bucket(layout)
            yield bucket
            bucket.clear()
        # Looked up afresh: what was moved left its old memory to the parts that are read here.
        making.require_unchanged(read_export(self._context.export).used)

    def _entered(self) -> Export:
        if self._export is None:
            raise RuntimeError("a stream is iterated inside its context")
        return self._export


class _Making:
    """One iteration: recipes in the plan's order, over sources that are gathered as they are needed."""

    def __init__(
        self, export: Export, context: StreamContext, staged: dict[str, Tensor], cache: dict[str, Tensor]
    ) -> None:
        self._export = export
        self._context = context
        self._collectives = Collectives(context, export.device)
        shared = (layout.nbytes for layout in context.buckets if len(layout.entries) > 1)
        block = max(shared, default=SMALL)
        self._small = min(SMALL, block)
        self._gathering = Gathering(self._collectives, block, staged, wanted=context.wanted)
        self._recipes = _travelling(export, context)
        self._cache = cache
        self._fixed: dict[str, Tensor] = {}
        self._before = {item.source.key: item.state for item in export.used}

    def require_unchanged(self, items: Iterable[Held]) -> None:
        """Raises ExportError when the trainer stepped, moved or freed one of them since the export began."""
        for item in items:
            before = self._before[item.source.key]
            if item.state[0] != before[0]:
                raise moved(item.source.key)
            if item.state != before:
                raise ExportError(
                    f"{item.source.key} was changed while its version was exported.",
                    "Some buckets would hold the weights before a training step and some those after it.",
                    "Train after the sync has returned, and sync again.",
                )

    @torch.no_grad()
    def agree(self) -> None:
        """Copies that nothing keeps equal are equal on all ranks, or are taken from rank 0."""
        if not self._context.manifest.collective:
            return
        loose = [item for item in self._export.used if not item.boxes and not item.kept_equal]
        chosen = [item for item in loose if item.is_buffer and self._export.options.buffers == "rank0"]
        keys = {item.source.key for item in chosen}
        require_equal([item for item in loose if item.source.key not in keys], self._collectives)
        self._fixed = from_first_rank(chosen, self._collectives)

    @torch.no_grad()
    def bucket(self, layout: BucketLayout) -> list[tuple[int, Tensor]]:
        """The bucket's tensors, in layout order."""
        numbers = [entry.tensor for entry in layout.entries]
        keys = dict.fromkeys(key for number in numbers for key in self._recipes[number].sources)
        # Before anything is read: to read a part whose memory was freed ends the process.
        self.require_unchanged(self._export.held[key] for key in keys)
        self._gather_small([self._recipes[number] for number in numbers])
        made: list[tuple[int, Tensor]] = []
        for place, number in enumerate(numbers):
            recipe = self._recipes[number]
            sources = [self._source(key) for key in recipe.sources]
            if self._context.wanted:
                made.append((number, recipe.make([source for source in sources if source is not None])))
            del sources
            self._forget(
                {key for later in numbers[place + 1 :] for key in self._recipes[later].sources}, number
            )
        self._collectives.settle()
        return made

    def _gather_small(self, recipes: Sequence[Recipe]) -> None:
        groups: dict[tuple[int, ...], list[Held]] = {}
        for key in dict.fromkeys(key for recipe in recipes for key in recipe.sources):
            held = self._export.held[key]
            if key not in self._cache and held.nbytes < self._small and self._is_gathered(held):
                groups.setdefault(held.ranks, []).append(held)
        for items in groups.values():
            self._cache.update(self._gathering.together(items))

    def _source(self, key: str) -> Tensor | None:
        """The whole tensor; None on a rank that does not want it."""
        held = self._export.held[key]
        if key in self._cache:
            return self._cache[key]
        if self._is_gathered(held):
            if held.nbytes < self._small:
                return None  # gathered already, on a rank that keeps nothing
            whole = self._gathering.alone(held)
        elif not self._context.wanted:
            return None
        elif key in self._fixed:
            whole = self._fixed[key].clone()
        else:
            whole = self._gathering.whole_here(held)
        if self._context.wanted:
            self._cache[key] = whole
        return whole

    def _forget(self, later_in_bucket: set[str], number: int) -> None:
        """Keeps what small sources this bucket still needs, and what the very next recipe reads."""
        following = self._recipes[number + 1].sources if number + 1 < len(self._recipes) else ()
        for key in list(self._cache):
            small = self._export.held[key].nbytes < self._small
            if key not in following and not (small and key in later_in_bucket):
                del self._cache[key]

    def _is_gathered(self, held: Held) -> bool:
        """Whether this rank's group gathers it: it is cut, and one of the group's ranks sends it."""
        return bool(held.boxes) and not set(held.ranks).isdisjoint(self._context.serving_ranks)


def _travelling(export: Export, context: StreamContext) -> list[Recipe]:
    """Recipes by index into the plan's tensors."""
    by_name = {item.name: item for item in export.recipes}
    return [
        by_name[spec.name]
        for spec, entry in zip(context.manifest.tensors, context.entries, strict=True)
        if not entry.dropped
    ]
