"""The ways in which a trainer wraps a model, by name; each wraps in place or gives a wrapper."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tiny_models import layers_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import (  # type: ignore[no-redef]
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

DEVICE = torch.device(os.environ.get("FSDP_TEST_DEVICE", "cpu"))
"""Where ranks compute: `cuda:N`, set before this is imported, on a rank of the GPU tests."""


def plain(model: nn.Module) -> nn.Module:
    return model.to(DEVICE)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.to(DEVICE))


def fsdp1(model: nn.Module, *, orig: bool, strategy: str = "FULL_SHARD", **more: Any) -> nn.Module:
    """One unit a layer, and the root."""
    layers = set(layers_of(model))
    if not orig:
        # Frozen and trained parameters may not share a flat parameter.
        layers |= {
            module
            for module in model.modules()
            if module._parameters
            and any(p.requires_grad for p in model.parameters())
            != all(p.requires_grad for p in model.parameters())
        }
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in layers,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        device_id=DEVICE,
        **more,
    )


def fsdp2(model: nn.Module, *, root: bool = True, **more: Any) -> nn.Module:
    """One unit a layer, and the root where it is one."""
    for layer in layers_of(model):
        fully_shard(layer, **more)
    if root:
        fully_shard(model, **more)
    return model


def fsdp2_by_columns(model: nn.Module) -> nn.Module:
    """Shards of dimension 1 where it is even, of dimension 0 elsewhere: mixed sharding."""
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None

    return fsdp2(model, shard_placement_fn=place)


def checkpointed(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    layers = set(layers_of(model))
    apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    return wrap(model)


def compiled(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    return torch.compile(wrap(model), backend="eager")  # type: ignore[return-value]


def _mixed2() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp1": partial(fsdp1, orig=True),
    "fsdp1 flat": partial(fsdp1, orig=False),
    "fsdp1 grad op": partial(fsdp1, orig=True, strategy="SHARD_GRAD_OP"),
    "fsdp1 no shard": partial(fsdp1, orig=True, strategy="NO_SHARD"),
    "fsdp1 flat no shard": partial(fsdp1, orig=False, strategy="NO_SHARD"),
    "fsdp1 offload": partial(fsdp1, orig=True, cpu_offload=CPUOffload(offload_params=True)),
    "fsdp1 mixed": partial(fsdp1, orig=True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
    "fsdp1 checkpointed": partial(checkpointed, partial(fsdp1, orig=True)),
    "fsdp2": fsdp2,
    "fsdp2 kept": partial(fsdp2, reshard_after_forward=False),
    "fsdp2 layers only": partial(fsdp2, root=False),
    "fsdp2 by columns": fsdp2_by_columns,
    "fsdp2 offload": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 mixed": lambda model: fsdp2(model, mp_policy=_mixed2()),
    "fsdp2 checkpointed": partial(checkpointed, fsdp2),
    "fsdp2 compiled": partial(compiled, fsdp2),
}


def hsdp1(model: nn.Module, *, orig: bool) -> nn.Module:
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(model, orig=orig, strategy="HYBRID_SHARD", device_mesh=mesh)


def hsdp2(model: nn.Module) -> nn.Module:
    return fsdp2(model, mesh=init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: nn.Module, *, sharded: bool, mesh: DeviceMesh | None = None) -> nn.Module:
    """Columns of q, k, v, gate and up, rows of o and down over `tp`; FSDP over `dp` where `sharded`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh or init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))
    styles = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    styles |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in layers_of(model):
        parallelize_module(layer, mesh["tp"], styles)
    return fsdp2(model, mesh=mesh["dp"]) if sharded else model


FOUR_RANKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "hsdp1": partial(hsdp1, orig=True),
    "hsdp1 flat": partial(hsdp1, orig=False),
    "hsdp2": hsdp2,
    "tp": partial(tensor_parallel, sharded=False),
    "fsdp over tp": partial(tensor_parallel, sharded=True),
    "fsdp2 on four": fsdp2,
    "fsdp1 on four": partial(fsdp1, orig=True),
}
