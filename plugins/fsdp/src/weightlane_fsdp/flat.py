"""FSDP1: original parameters as ranges of a flat parameter, of which each rank holds one shard.

Asking for a state dict would be a collective, and outside of it `named_parameters` gives slices without shape
(`use_orig_params=True`) or flat parameters (False). The handle knows both name and range at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightlane.errors import ExportError
from weightlane.export.recipe import Source
from weightlane.packing import dtype_name
from weightlane_fsdp.boxes import Box
from weightlane_fsdp.held import Held
from weightlane_fsdp.tree import wrapped_by_fsdp1

if TYPE_CHECKING:
    from torch import Tensor, nn

    from weightlane_fsdp.options import Precision


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Parameter `number` of a handle, `elements` from `start` on in the flat parameter, padding included."""

    handle: Any
    number: int
    start: int


FlatRanges = dict[tuple[int, str], FlatRange]
"""By `id` of the module that a parameter was taken from, and its name there."""


def flat_ranges(model: nn.Module) -> FlatRanges:
    """Every parameter that FSDP1 flattened; shared ones under each of their places."""
    found: FlatRanges = {}
    for unit in wrapped_by_fsdp1(model):
        handle = unit._handle
        if handle is None:
            continue
        flat = handle.flat_param
        starts, offset = [], 0
        for elements, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(offset)
            offset += elements
        for number, info in enumerate(flat._param_infos):
            found[id(info.module), info.param_name] = FlatRange(handle, number, starts[number])
        for shared in flat._shared_param_infos:
            owner = found[id(shared.prim_module), shared.prim_param_name]
            found[id(shared.module), shared.param_name] = owner
    return found


def held_in_flat(key: str, place: FlatRange, precision: Precision) -> Held:
    """One original parameter.

    Raises:
        ExportError: tensor parallelism below FSDP1, whose flat parameter holds parts of parts.
    """
    handle, number = place.handle, place.number
    flat = handle.flat_param
    if flat._param_extensions[number] is not None:
        raise ExportError(
            f"{key} is a part of a tensor-parallel tensor inside an FSDP1 unit.",
            "The flat parameter does not say how its parts go together.",
            "Use fully_shard (FSDP2) over tensor parallelism.",
        )
    shape = tuple(flat._shapes[number])
    elements = int(flat._numels[number])
    local = local_shard(handle)
    start, end = 0, elements
    boxes: tuple[Box, ...] = ()
    if handle.uses_sharded_strategy and handle.world_size > 1:
        each = local.numel()
        boxes = _boxes(place.start, elements, each, dist.get_process_group_ranks(handle.process_group))
        mine = next(box for box in boxes if box.rank == dist.get_rank())
        start, end = mine.start[0], mine.start[0] + mine.size[0]
        local_start = place.start + start - handle.rank * each if mine.size[0] else 0
    else:
        local_start = place.start
    dtype = flat.dtype
    if precision == "compute" and handle._uses_param_mixed_precision:
        dtype = handle._fwd_bwd_param_dtype
    return Held(
        source=Source(key, shape, dtype_name(dtype)),
        dtype=dtype,
        part=local[local_start : local_start + end - start],
        written=flat if flat._params is None else flat._params[number],
        device=handle.device,
        tie=(id(handle), number),
        boxes=boxes,
        frame=(elements,),
        stride=_stride(flat, number),
        kept_equal=not boxes,
        owned_offload=handle._offload_params,
    )


def _stride(flat: Any, number: int) -> tuple[int, ...]:
    """In which order an original parameter lies in the flat one: () for its own shape's.

    Before 2.6, which records it, torch flattened every parameter to that.
    """
    contiguities = getattr(flat, "_contiguities", None)
    return () if contiguities is None or contiguities[number] else tuple(flat._strides[number])


def local_shard(handle: Any) -> Tensor:
    """This rank's shard in full precision, live, whether the flat parameter is gathered now or not."""
    flat: Tensor = handle.flat_param
    if not handle.uses_sharded_strategy or tuple(flat.shape) == tuple(flat._sharded_size):  # type: ignore[attr-defined]
        low = getattr(flat, "_mp_shard", None)
        if low is None or flat.data_ptr() != low.data_ptr() or not low.numel():
            return flat.detach()
    shard = getattr(flat, "_local_shard", None)
    if not isinstance(shard, torch.Tensor):
        raise ExportError(
            f"A flat parameter of {type(handle._fully_sharded_module).__name__} has no shard on this rank.",
            "FSDP1 keeps it beside a flat parameter that is gathered, and this one has none.",
            "Call sync outside of forward, backward and summon_full_params.",
        )
    return shard.detach()


def _boxes(start: int, elements: int, each: int, ranks: list[int]) -> tuple[Box, ...]:
    """The range from `start`, cut at every multiple of `each`."""
    found = []
    for number, rank in enumerate(ranks):
        first = min(max(number * each - start, 0), elements)
        last = min(max((number + 1) * each - start, 0), elements)
        found.append(Box(rank, (first,), (last - first,)))
    return tuple(sorted(found, key=lambda box: box.rank))
