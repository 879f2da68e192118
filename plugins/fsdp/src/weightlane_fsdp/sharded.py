"""FSDP2 and tensor parallelism: DTensors, each with a mesh and a placement for every dimension of it.

After a forward without gradients some parameters stay gathered, as plain tensors in the compute dtype. The
shard that the optimizer steps is known to FSDP all the time, and is what is exported; nothing is resharded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightlane.errors import ExportError
from weightlane.export.recipe import Source
from weightlane.packing import dtype_name
from weightlane_fsdp.boxes import Box, Cut, UnknownOrderError, boxes_of
from weightlane_fsdp.held import Held

if TYPE_CHECKING:
    from torch import Tensor, nn

    from weightlane_fsdp.options import Precision
    from weightlane_fsdp.torch_api import TorchApi


@dataclass(frozen=True, slots=True)
class Sharded:
    """A parameter that FSDP2 shards: the DTensor behind it, and the dtype that it computes in."""

    tensor: Tensor
    compute: torch.dtype | None
    offloaded: bool


ShardedParameters = dict[tuple[int, str], Sharded]
"""By `id` of the module that a parameter is registered in, and its name there."""


def sharded_parameters(model: nn.Module, api: TorchApi) -> ShardedParameters:
    """Every parameter of every FSDP2 unit, tied ones under each of their places."""
    found: ShardedParameters = {}
    for unit in model.modules():
        if not isinstance(unit, api.fsdp_module):
            continue
        for parameter, policy in api.parameters_of(unit):
            info = parameter._module_info
            sharded = Sharded(parameter.sharded_param, policy.param_dtype, parameter.offload_to_cpu)
            found[id(info.module), info.param_name] = sharded
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(module), name] = sharded
    return found


class Meshes:
    """Who holds what on each mesh; asked of torch once a layout, since it computes it anew each time."""

    def __init__(self, api: TorchApi) -> None:
        self._api = api
        self._ranks: dict[int, _Ranks] = {}
        self._boxes: dict[object, tuple[Box, ...]] = {}

    def boxes(self, key: str, tensor: Any) -> tuple[Box, ...]:
        """The parts of all ranks that together hold the tensor once.

        Raises:
            ExportError: see `held_in_mesh`.
        """
        shape, placements = tuple(tensor.shape), tuple(tensor.placements)
        layout = (id(tensor.device_mesh), shape, placements)
        if layout not in self._boxes:
            self._boxes[layout] = self._cut(key, shape, placements, self._ranks_of(key, tensor.device_mesh))
        return self._boxes[layout]

    def _ranks_of(self, key: str, mesh: Any) -> _Ranks:
        if id(mesh) not in self._ranks:
            here = mesh.get_coordinate()
            if here is None:
                raise ExportError(
                    f"{key} lives on a mesh that rank {dist.get_rank()} is not in.",
                    "Every rank exports every tensor, and this one holds no part of it.",
                    "Call connect on the ranks of that mesh alone.",
                )
            ranks = mesh.mesh
            places = itertools.product(*(range(size) for size in ranks.shape))
            at = {place: int(ranks[place]) for place in places}
            self._ranks[id(mesh)] = _Ranks(tuple(ranks.shape), at, tuple(here))
        return self._ranks[id(mesh)]

    def _cut(
        self, key: str, shape: tuple[int, ...], placements: tuple[Any, ...], ranks: _Ranks
    ) -> tuple[Box, ...]:
        cuts: dict[int, Cut] = {}
        for axis, placement in enumerate(placements):
            cut = self._api.cut_of(placement, len(shape))
            if cut is not None:
                cuts[axis] = cut
            elif not placement.is_replicate():
                raise ExportError(
                    f"{key} has placement {placement} over dimension {axis} of its mesh.",
                    "Only shards and replicas are whole values; a partial one is a sum that was not made.",
                    "Redistribute it to Shard or Replicate before connect.",
                )
        if not self._api.tells_strided_shards and len({cut.dim for cut in cuts.values()}) < len(cuts):
            raise ExportError(
                f"{key} is cut twice along one dimension, by {placements}.",
                "This torch does not say which dimension of the mesh cut it first.",
                "Use torch 2.6 or newer for FSDP over tensor parallelism.",
            )
        try:
            return boxes_of(shape, ranks.shape, ranks.at, cuts, ranks.here)
        except UnknownOrderError as error:
            raise ExportError(
                f"{key} has placements {placements}: {error}.",
                "In which order the dimensions of the mesh cut it cannot be told.",
                "Report this to weightlane-fsdp with the version of torch.",
            ) from error


@dataclass(frozen=True, slots=True)
class _Ranks:
    """A mesh: its shape, the global rank at each coordinate, and this rank's coordinate."""

    shape: tuple[int, ...]
    at: dict[tuple[int, ...], int]
    here: tuple[int, ...]


def held_in_mesh(key: str, sharded: Sharded, precision: Precision, meshes: Meshes) -> Held:
    """One DTensor.

    Raises:
        ExportError: a placement that is no shard and no replica, a mesh without this rank, or a local part
            of another shape than the placements say.
    """
    tensor: Any = sharded.tensor
    local: Tensor = tensor._local_tensor.detach()
    shape = tuple(tensor.shape)
    boxes = meshes.boxes(key, tensor)
    mine = next(box for box in boxes if box.rank == dist.get_rank())
    if tuple(local.shape) != mine.size:
        raise ExportError(
            f"{key} has a part of shape {list(local.shape)} here; its placements {tensor.placements} over a "
            f"mesh of {tuple(tensor.device_mesh.shape)} say {list(mine.size)}.",
            "Where the parts go in the whole cannot be told.",
            "Report this to weightlane-fsdp with the version of torch.",
        )
    dtype = local.dtype
    if precision == "compute" and sharded.compute is not None and dtype.is_floating_point:
        dtype = sharded.compute
    return Held(
        source=Source(key, shape, dtype_name(dtype)),
        dtype=dtype,
        part=local,
        written=sharded.tensor,
        device=_device(tensor.device_mesh.device_type),
        tie=id(sharded.tensor),
        boxes=boxes if len(boxes) > 1 else (),
        frame=shape,
        kept_equal=len(boxes) == 1,
        owned_offload=sharded.offloaded,
    )


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
