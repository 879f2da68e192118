"""Where torch keeps DTensor and FSDP2, by era: public modules since 2.6, private ones before."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane_fsdp.boxes import Cut
from weightlane_fsdp.eras import COMPOSABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.types import BackendDescriptor


@dataclass(frozen=True, slots=True)
class TorchApi:
    """The types of one era; `strided_shard` is None where FSDP over tensor parallelism leaves no mark."""

    dtensor: type[Any]
    fsdp_module: type[Any]
    shard: type[Any]
    strided_shard: type[Any] | None

    @property
    def tells_strided_shards(self) -> bool:
        return self.strided_shard is not None

    def cut_of(self, placement: Any, dims: int) -> Cut | None:
        """The cut that a placement makes of a tensor of `dims` dimensions; None for one that cuts nothing."""
        if self.strided_shard is not None and isinstance(placement, self.strided_shard):
            return Cut(placement.dim % dims, placement.split_factor)
        # Other placements say `is_shard()` too, but cut otherwise.
        return Cut(placement.dim % dims) if type(placement) is self.shard else None

    def parameters_of(self, unit: Any) -> Iterable[tuple[Any, Any]]:
        """FSDP's own record of each parameter that a unit manages itself, and its precision policy."""
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        return [(parameter, group.mp_policy) for group in groups for parameter in group.fsdp_params]


def torch_api(descriptor: BackendDescriptor) -> TorchApi:
    """The types of the era that was selected."""
    return _composable() if descriptor.era == COMPOSABLE else _public()


def _public() -> TorchApi:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, placement_types

    return TorchApi(DTensor, FSDPModule, placement_types.Shard, placement_types._StridedShard)


def _composable() -> TorchApi:
    # By name: in a newer torch, where this is checked, they are elsewhere.
    fsdp = importlib.import_module("torch.distributed._composable.fsdp")
    tensor = importlib.import_module("torch.distributed._tensor")
    placements = importlib.import_module("torch.distributed._tensor.placement_types")
    strided = getattr(placements, "_StridedShard", None)
    return TorchApi(tensor.DTensor, fsdp.FSDPModule, placements.Shard, strided)
