"""Tensors that every rank holds whole: whether the copies are equal, and rank 0's where that was chosen.

Nothing keeps buffers, and parameters outside of every wrapper, equal between ranks; one rank's copy would be
sent in silence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import xxhash

from weightlane.errors import ExportError
from weightlane.packing import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane_fsdp.collectives import Collectives
    from weightlane_fsdp.held import Held

_PIECE = 4 << 20  # elements that are widened at once on a GPU
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that each position weighs differently


def require_equal(items: Sequence[Held], collectives: Collectives) -> None:
    """Raises the same ExportError on all ranks when a rank's copy of one of `items` differs from rank 0's."""
    if not items:
        return
    ranks = collectives.everyone
    mine = torch.tensor([fingerprint(item.part) for item in items], dtype=torch.int64)
    mine = mine.to(collectives.device)
    out = torch.empty(len(ranks) * len(items), dtype=torch.int64, device=collectives.device)
    # Bounded by `Collectives`.
    collectives.all_gather(out.view(torch.uint8), mine.view(torch.uint8), ranks)
    collectives.settle()
    told = out.view(len(ranks), len(items)).tolist()
    differing = [
        (item, rank)
        for number, item in enumerate(items)
        for rank in ranks
        if told[rank][number] != told[0][number]
    ]
    if differing:
        item, rank = differing[0]
        others = len({found.source.key for found, _ in differing}) - 1
        more = f", and so for {others} more" if others else ""
        kind = "buffer" if item.is_buffer else "parameter"
        choice = ", or pass buffers='rank0' to the trainer" if item.is_buffer else ""
        raise ExportError(
            f"The {kind} {item.source.key} has other values on rank {rank} than on rank 0{more}.",
            "No wrapper keeps the ranks' copies equal, and which one is right cannot be told.",
            f"Make them equal before a sync{choice}.",
        )


def from_first_rank(items: Sequence[Held], collectives: Collectives) -> dict[str, Tensor]:
    """Rank 0's values of `items` on every rank, by key, in storage of their own."""
    if not items:
        return {}
    sizes = [math.prod(item.source.shape) * item.dtype.itemsize for item in items]
    padded = [-(-size // 16) * 16 for size in sizes]
    block = torch.empty(sum(padded), dtype=torch.uint8, device=collectives.device)
    found: dict[str, Tensor] = {}
    for item, size, place in zip(items, sizes, torch.split(block, padded), strict=True):
        view = place[:size].view(item.dtype).view(item.source.shape)
        view.copy_(item.part)
        found[item.source.key] = view
    if len(block):
        collectives.broadcast(block, 0, collectives.everyone)  # bounded by `Collectives`
    return found


def fingerprint(tensor: Tensor) -> int:
    """64 bits over the values, as a signed number; computed where the tensor is."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.device.type != "cuda":
        digest = xxhash.xxh3_64_intdigest(memory_of(plain.cpu()))
        return digest - (1 << 64) if digest >> 63 else digest
    data = plain.reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, len(data), _PIECE):
        piece = data[first : first + _PIECE].to(torch.int64)
        weights = torch.arange(first, first + len(piece), device=data.device, dtype=torch.int64)
        total += (piece * (weights * 2 + 1) * _SPREAD).sum()
    return int(total.item())
