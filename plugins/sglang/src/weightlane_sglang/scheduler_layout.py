"""How the scheduler that runs our code is laid out; SGLang is imported in functions alone.

Since 0.5.14 SGLang tells it in one place. Before, its process groups do, and that LoRA is on shows in the
model itself: its wrapped layers are of one module of SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_LORA_LAYERS = "sglang.srt.lora.layers"


@dataclass(frozen=True, slots=True)
class SchedulerLayout:
    """Ranks and sizes of the scheduler's own groups."""

    tensor_rank: int
    tensor: int
    pipeline: int
    expert: int


def scheduler_layout() -> SchedulerLayout:
    """Of the scheduler that this is called in."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return _by_groups()
    parallel = get_parallel()
    return SchedulerLayout(
        int(parallel.tp_rank), int(parallel.tp_size), int(parallel.pp_size), int(parallel.moe_ep_size)
    )


def has_lora(model: nn.Module) -> bool:
    """Whether LoRA is on."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        return any(type(layer).__module__ == _LORA_LAYERS for layer in model.modules())
    return bool(get_server_args().enable_lora)


def _by_groups() -> SchedulerLayout:
    from sglang.srt.distributed import parallel_state as groups

    return SchedulerLayout(
        int(groups.get_tensor_model_parallel_rank()),
        int(groups.get_tensor_model_parallel_world_size()),
        int(groups.get_pp_group().world_size),
        int(groups.get_moe_expert_parallel_world_size()),
    )
