"""Everything that this rank holds of a model, by clean path, looked up afresh for each sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightlane.errors import ExportError
from weightlane.export.recipe import Source
from weightlane.packing import dtype_name, is_freed, is_plain, kind_of
from weightlane.torch_trainer.modules import freed
from weightlane_fsdp.flat import flat_ranges, held_in_flat
from weightlane_fsdp.held import Held
from weightlane_fsdp.sharded import Meshes, Sharded, held_in_mesh, sharded_parameters
from weightlane_fsdp.tree import places

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from weightlane_fsdp.options import Precision
    from weightlane_fsdp.torch_api import TorchApi
    from weightlane_fsdp.tree import Place


def holdings(model: Any, precision: Precision, api: TorchApi) -> dict[str, Held]:
    """Parameters and persistent buffers, in the order of a state dict. No collective, no copy.

    Raises:
        ExportError: `model` is no module, or holds something that is no shard and no plain tensor, or whose
            memory was freed.
    """
    if not isinstance(model, torch.nn.Module):
        raise ExportError(
            f"A trainer model of type {type(model).__name__} cannot be exported.",
            "The fsdp trainer takes the torch.nn.Module that the trainer steps, on every rank.",
            "Pass it as model=.",
        )
    flat = flat_ranges(model)
    sharded = sharded_parameters(model, api)
    meshes = Meshes(api)
    taken: dict[int, list[str]] = {}
    for module, name in flat:
        taken.setdefault(module, []).append(name)
    found: dict[str, Held] = {}
    for place in places(model, taken):
        at = (id(place.module), place.name)
        if at in flat:
            found[place.key] = held_in_flat(place.key, flat[at], precision)
        elif at in sharded:
            found[place.key] = held_in_mesh(place.key, sharded[at], precision, meshes)
        elif place.tensor is not None and isinstance(place.tensor, api.dtensor):
            found[place.key] = held_in_mesh(place.key, Sharded(place.tensor, None, False), precision, meshes)
        else:
            found[place.key] = _whole(place)
    for key, item in found.items():
        if is_freed(item.part):
            raise freed(key)
    return found


def _whole(place: Place) -> Held:
    tensor = place.tensor
    if tensor is not None and tensor.layout is torch.strided and is_freed(tensor):
        raise freed(place.key)
    if tensor is None or not is_plain(tensor):
        raise ExportError(
            f"{place.key} is {kind_of(tensor)}, not a plain tensor with data.",
            "Only dense tensors and shards of them can be exported.",
            "Materialise it, or take it out of the module.",
        )
    tensor = tensor.detach()
    return Held(
        source=Source(place.key, tuple(tensor.shape), dtype_name(tensor.dtype)),
        dtype=tensor.dtype,
        part=tensor,
        written=tensor,
        device=tensor.device,
        tie=_storage(place.key, tensor),
        kept_equal=place.in_ddp and not place.is_buffer,
        is_buffer=place.is_buffer,
    )


def _storage(key: str, tensor: Tensor) -> Hashable:
    if tensor.numel() == 0:
        return key
    # A view that is negated or conjugated when it is read has other values at the same place.
    views = (tensor.is_neg(), tensor.is_conj())
    place = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
    return (*place, *views)
