"""The stream of a plain torch trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weightlane.export.rounding import RoundingLoss
from weightlane.packing import torch_dtype
from weightlane.torch_trainer.announced import require_as_announced
from weightlane.torch_trainer.describe import aliases_of
from weightlane.torch_trainer.exported import exported
from weightlane.torch_trainer.unchanged import Unchanged
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from weightlane.contexts import StreamContext
    from weightlane.manifest import TensorSpec
    from weightlane.stream import ExportStream
    from weightlane.torch_trainer.exported import Exported


class TorchStream:
    """Yields the plan's buckets; missing tensors come by broadcast from their first holder.

    In modes full and adapter a tensor is valid until the next bucket: it aliases the module (training is
    paused during a sync) or a broadcast buffer. In mode merged each has memory of its own. Live tensors are
    never written, so there is nothing to restore at exit; if the trainer writes to them, moves or offloads
    them before the end, the export fails. `update_lost` is the share of the adapters' change that rounding to
    the weights' dtype took from what was made so far; None where nothing was merged.
    """

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self.collective = context.manifest.collective
        self.device = "cpu"
        self.owns_storage = context.export.phase is Phase.MERGED
        self._loss = RoundingLoss()
        self._before: Unchanged | None = None
        self._specs = [
            spec
            for spec, entry in zip(context.manifest.tensors, context.entries, strict=True)
            if not entry.dropped
        ]

    @property
    def update_lost(self) -> float | None:
        """A share from 0 to 1, or None."""
        return self._loss.update_lost

    def __enter__(self) -> ExportStream:
        found = exported(self._context.export)
        require_as_announced(
            self._context.manifest,
            self._context.entries,
            found.recipes,
            lambda: aliases_of(found),
            rank=self._context.export.rank,
        )
        adapter = self._context.manifest.adapter
        if adapter is not None and self._context.export.model is not None:
            from weightlane.torch_trainer.adapter import require_scales

            require_scales(self._context.export.model, adapter)
        self._before = Unchanged(found.tensors)
        self._loss = RoundingLoss()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        """One list of (index into the plan's tensors, tensor) a bucket; empty on a rank that only drains."""
        found = exported(self._context.export)
        before = self._before or Unchanged(found.tensors)
        for layout in self._context.buckets:
            specs = [self._specs[entry.tensor] for entry in layout.entries]
            keys = [
                key
                for spec in specs
                if spec.name in found.recipes
                for key in found.recipes[spec.name].sources
            ]
            before.require(found.tensors, keys)
            bucket: list[tuple[int, Tensor]] = []
            for entry, spec in zip(layout.entries, specs, strict=True):
                tensor = self._whole(spec, found)
                if self._context.wanted and tensor is not None:
                    bucket.append((entry.tensor, tensor))
            yield bucket
            # Asked again, since what was yielded may have been read only now.
            before.require(found.tensors, keys)
        # Looked up afresh: what was moved left its old memory to the tensors that are read here.
        before.require(exported(self._context.export).tensors, found.tensors)

    def _whole(self, spec: TensorSpec, found: Exported) -> Tensor | None:
        everyone_has_it = set(self._context.serving_ranks) <= set(spec.holders)
        if everyone_has_it or spec.elements == 0:
            if spec.name in found.recipes:
                return self._made(spec.name, found)
            return None if spec.elements else _made_here(spec)
        rank, source = self._context.export.rank, spec.holders[0]
        held = self._made(spec.name, found) if rank in spec.holders else None
        mine = (
            held.cpu().resolve_conj().resolve_neg().contiguous()
            if rank == source and held is not None
            else _made_here(spec)
        )
        # As bytes on the CPU, since not every dtype (float8, bool) has a broadcast in every backend.
        # Bounded by the timeout of the lane's own group (`Bounds.collective`).
        dist.broadcast(mine.reshape(-1).view(torch.uint8), src=source, group=self._context.group)
        return mine if held is None else held

    def _made(self, name: str, found: Exported) -> Tensor:
        with self._loss.measured():
            return found.owned(name) if self.owns_storage else found.made(name)


def _made_here(spec: TensorSpec) -> Tensor:
    # Made as bytes, since torch warns of some dtypes (complex32) when it makes tensors of them.
    return torch.empty(spec.nbytes, dtype=torch.uint8).view(torch_dtype(spec.dtype)).view(spec.shape)
