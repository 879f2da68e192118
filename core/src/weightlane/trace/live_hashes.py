"""The worker's half of a read-back: hashes of live elements where a table says that a load puts them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import xxhash

from weightlane.packing import dtype_name, memory_of
from weightlane.trace.geometry import Region
from weightlane.trace.intervals import TooFineError, count
from weightlane.trace.table import LiveHashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from weightlane.trace.table import Fill, PlacementTable, TracedTarget


def live_hashes(table: PlacementTable, live: Mapping[str, Tensor]) -> LiveHashes:
    """Looks at every placement and every constant of a table; writes nothing.

    Args:
        table: of this worker.
        live: the model's tensors by name, as they are after the engine's own processing.
    """
    changed: dict[int, str] = {}
    readable: dict[int, Tensor] = {}
    for number, target in enumerate(table.targets):
        tensor = live.get(target.name)
        if target.form != "live":
            continue
        if tensor is None:
            changed[number] = "is gone"
        elif not _same_form(tensor, target):
            changed[number] = f"is now {_told(tensor)}"
        else:
            readable[number] = tensor
    filled: list[int] = []
    unlike: list[int] = []
    with torch.no_grad():
        placements = tuple(
            hash_of(
                _in_target(
                    readable[item.target], item.target_offset, [(size, step) for size, _, step in item.axes]
                )
            )
            if item.target in readable
            else 0
            for item in table.placements
        )
        for number, fill in enumerate(table.fills):
            if fill.target not in readable:
                filled.append(0)
                continue
            compared, same = _compared(table, fill, readable[fill.target])
            filled.append(compared)
            if not same:
                unlike.append(number)
    return LiveHashes(table.digest(), placements, tuple(filled), tuple(unlike), changed)


def hash_of(tensor: Tensor) -> int:
    """Over the values in their order, as bytes; views that need not be contiguous."""
    return xxhash.xxh3_64_intdigest(memory_of(tensor.contiguous().cpu()))


def _compared(table: PlacementTable, fill: Fill, live: Tensor) -> tuple[int, bool]:
    """How many elements of a fill are its own still, and whether all of them hold its constant."""
    seen = _in_target(live, fill.offset, fill.axes)
    kept = _kept(table, fill)
    values = seen if kept is None else seen[kept.to(seen.device)]
    constant = torch.full((), fill.value, device=seen.device).to(seen.dtype)
    compared = values.numel()
    if seen.dtype.is_floating_point and seen.dtype.itemsize == 1:
        values, constant = values.float(), constant.float()  # torch compares no such dtype
    same = values.isnan() if math.isnan(fill.value) else values == constant
    return compared, bool(same.all())


def _kept(table: PlacementTable, fill: Fill) -> Tensor | None:
    """Which elements of a fill no placement has overwritten since: a mask in its shape, None for all."""
    placed = [item for item in table.placements if item.target == fill.target]
    regions = [Region(item.target_offset, tuple((n, step) for n, _, step in item.axes)) for item in placed]
    try:
        if not count(regions, [Region(fill.offset, fill.axes)]).covered:
            return None
    except TooFineError:
        pass
    target = table.targets[fill.target]
    span = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride, strict=True))
    mask = torch.ones(span, dtype=torch.bool)
    for item in placed:
        _in_target(mask, item.target_offset, [(n, step) for n, _, step in item.axes]).fill_(False)
    return _in_target(mask, fill.offset, fill.axes)


def _in_target(tensor: Tensor, offset: int, axes: Sequence[tuple[int, int]]) -> Tensor:
    """The elements at `offset`, counted from the tensor's own first."""
    sizes, steps = [size for size, _ in axes], [step for _, step in axes]
    return tensor.detach().as_strided(sizes, steps, tensor.storage_offset() + offset)


def _same_form(tensor: Tensor, target: TracedTarget) -> bool:
    form = (tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
    return form == (target.shape, target.stride, target.dtype)


def _told(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
