"""Layouts of routed experts: fused as newer trainers hold them, one by one as checkpoints do.

A fused projection has the shape (experts, rows, columns); gate and up lie one after the other in its rows.
Nothing here is imported before a model has such tensors; torch is not needed to name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One expert's projection inside a fused tensor: rows `start` to `stop` of its slice `expert`."""

    name: str
    expert: int
    start: int
    stop: int
    shape: tuple[int, ...]


def expert_parts(name: str, shape: tuple[int, ...]) -> tuple[ExpertPart, ...]:
    """The checkpoint tensors that a fused one holds, in the order in which they are to be sent.

    Args:
        name: `...experts.gate_up_proj` or `...experts.down_proj`; any other name holds nothing but itself,
            and the answer is empty.
        shape: (experts, rows, columns), output features in the rows.

    Raises:
        ExportError: the name is a fused one and the shape is not.
    """
    holder, _, fused = name.rpartition(".")
    projections = _PARTS.get(fused, ())
    if not projections or holder.rpartition(".")[2] != "experts":
        return ()
    if len(shape) != 3 or shape[1] % len(projections):
        raise ExportError(
            f"{name} has the shape {list(shape)}.",
            f"Fused experts have three dimensions, and {' and '.join(projections)} share the second evenly.",
            "Export each expert's projections under their own names.",
        )
    rows = shape[1] // len(projections)
    return tuple(
        ExpertPart(
            f"{holder}.{expert}.{projection}.weight",
            expert,
            number * rows,
            (number + 1) * rows,
            (rows, shape[2]),
        )
        for expert in range(shape[0])
        for number, projection in enumerate(projections)
    )


def expanded(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each expert's tensors by name, contiguous and with storage of their own: views cannot travel as bytes.

    A tensor that is not fused comes back as it is.
    """
    parts = expert_parts(name, tuple(tensor.shape))
    if not parts:
        yield name, tensor
    for part in parts:
        yield part.name, tensor[part.expert, part.start : part.stop].clone().contiguous()


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
