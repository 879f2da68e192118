"""The stream of a plain torch trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weightlane.errors import ExportError
from weightlane.packing import dtype_name, torch_dtype
from weightlane.torch_trainer.describe import held_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from weightlane.contexts import StreamContext
    from weightlane.manifest import TensorSpec
    from weightlane.stream import ExportStream


class TorchStream:
    """Yields the plan's buckets of live tensors; missing ones come by broadcast from their first holder.

    A tensor is valid until the next bucket: it aliases the module (training is paused during a sync) or a
    broadcast buffer. Nothing is merged or cast, so there is nothing to restore at exit.
    """

    owns_storage = False

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self.collective = context.manifest.collective
        self.device = "cpu"
        self._specs = [
            spec
            for spec, entry in zip(context.manifest.tensors, context.entries, strict=True)
            if not entry.dropped
        ]

    def __enter__(self) -> ExportStream:
        rank = self._context.export.rank
        held = held_tensors(self._context.export)
        for spec in self._specs:
            if rank in spec.holders:
                _require_as_announced(spec, held, rank)
        adapter = self._context.manifest.adapter
        if adapter is not None and self._context.export.model is not None:
            from weightlane.torch_trainer.adapter import require_scales

            require_scales(self._context.export.model, adapter)
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
        held = held_tensors(self._context.export)
        for layout in self._context.buckets:
            bucket: list[tuple[int, Tensor]] = []
            for entry in layout.entries:
                spec = self._specs[entry.tensor]
                tensor = self._whole(spec, held)
                if self._context.wanted and tensor is not None:
                    bucket.append((entry.tensor, tensor))
            yield bucket

    def _whole(self, spec: TensorSpec, held: dict[str, Tensor]) -> Tensor | None:
        everyone_has_it = set(self._context.serving_ranks) <= set(spec.holders)
        if everyone_has_it or spec.elements == 0:
            return held.get(spec.name, None if spec.elements else _made_here(spec))
        rank, source = self._context.export.rank, spec.holders[0]
        mine = (
            held[spec.name].cpu().resolve_conj().resolve_neg().contiguous()
            if rank == source
            else _made_here(spec)
        )
        # As bytes on the CPU, since not every dtype (float8, bool) has a broadcast in every backend.
        # Bounded by the timeout of the lane's own group (`Bounds.collective`).
        dist.broadcast(mine.reshape(-1).view(torch.uint8), src=source, group=self._context.group)
        return held[spec.name] if rank in spec.holders else mine


def _made_here(spec: TensorSpec) -> Tensor:
    # Made as bytes, since torch warns of some dtypes (complex32) when it makes tensors of them.
    return torch.empty(spec.nbytes, dtype=torch.uint8).view(torch_dtype(spec.dtype)).view(spec.shape)


def _require_as_announced(spec: TensorSpec, held: dict[str, Tensor], rank: int) -> None:
    tensor = held.get(spec.name)
    now = "gone" if tensor is None else f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if now != f"{spec.dtype}{list(spec.shape)}":
        raise ExportError(
            f"{spec.name} is {now} on rank {rank}, but was {spec.dtype}{list(spec.shape)} in the manifest.",
            "The model was changed after connect.",
            "Close the lane and connect again.",
        )
