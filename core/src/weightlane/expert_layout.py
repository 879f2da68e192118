"""Layouts of routed experts that no library is asked for: shares of ranks, transposed stacks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def expert_ranges(experts: int, parts: int) -> tuple[tuple[int, int], ...]:
    """First expert and the one after the last, for each of `parts`: every expert once, larger shares first.

    A share is empty only where there are more parts than experts.

    Raises:
        ValueError: `parts` is not positive, or `experts` negative.
    """
    if parts < 1 or experts < 0:
        raise ValueError(f"{experts} experts cannot be dealt out to {parts} parts")
    share, larger = divmod(experts, parts)
    starts = [part * share + min(part, larger) for part in range(parts + 1)]
    return tuple(pairwise(starts))


def transposed_experts(experts: list[Tensor]) -> Tensor:
    """One fused tensor (experts, columns, rows) of each expert's (rows, columns): the layout of GPT-OSS.

    Its checkpoints hold gate and up of one feature next to each other; the order of rows is kept, so they
    must come interleaved.
    """
    import torch

    return torch.stack([expert.t() for expert in experts]).contiguous()
