"""A wrapped module's parameters and persistent buffers by clean path: no state dict, so no collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

FLAT_PARAMETER = "_flat_param"


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or buffer where it is registered; `tensor` is None for one that FSDP1 took away."""

    key: str
    module: nn.Module
    name: str
    tensor: Tensor | None
    is_buffer: bool
    in_ddp: bool


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module inside FSDP1, DDP, activation checkpointing and torch.compile."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: nn.Module) -> nn.Module | None:
    if isinstance(module, FullyShardedDataParallel):
        return module._modules["_fsdp_wrapped_module"]
    if isinstance(module, DistributedDataParallel):
        return module._modules["module"]
    if isinstance(module, ActivationWrapper):
        return module._modules["_checkpoint_wrapped_module"]
    if type(module).__name__ == "OptimizedModule":
        return module._modules["_orig_mod"]
    return None


def places(
    module: nn.Module, taken: dict[int, list[str]], prefix: str = "", *, in_ddp: bool = False
) -> Iterator[Place]:
    """In the order of a state dict, tied tensors under each of their names.

    Args:
        module: wrapped or not.
        taken: names that FSDP1 took out of a module, by `id` of the module.
        prefix: the path so far.
        in_ddp: a DistributedDataParallel is around it.

    Raises:
        ExportError: a module keeps extra state, which is no tensor.
    """
    in_ddp = in_ddp or isinstance(module, DistributedDataParallel)
    module = _through(module)
    in_ddp = in_ddp or isinstance(module, DistributedDataParallel)
    module = unwrapped(module)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        raise ExportError(
            f"{prefix.removesuffix('.') or 'The model'} keeps extra state.",
            "What travels is tensors with names; extra state is neither.",
            "Take it out of the module, or register it as a buffer.",
        )
    names = dict.fromkeys([*module._parameters, *taken.get(id(module), ())])
    for name in names:
        tensor = module._parameters.get(name)
        if name != FLAT_PARAMETER and (tensor is not None or name in taken.get(id(module), ())):
            yield Place(prefix + name, module, name, tensor, is_buffer=False, in_ddp=in_ddp)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Place(prefix + name, module, name, buffer, is_buffer=True, in_ddp=in_ddp)
    for name, child in module._modules.items():
        if child is not None:
            yield from places(child, taken, f"{prefix}{name}.", in_ddp=in_ddp)


def _through(module: nn.Module) -> nn.Module:
    """Down to a DistributedDataParallel among the wrappers, or to the user's own module."""
    while not isinstance(module, DistributedDataParallel) and (inner := _inner(module)) is not None:
        module = inner
    return module


def wrapped_by_fsdp1(module: nn.Module) -> list[FullyShardedDataParallel]:
    """Every FSDP1 unit in it, itself included."""
    return [unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel)]


def is_plain_parameter(tensor: Tensor) -> bool:
    """Whether it is a dense tensor with data, whose bytes alone are its value."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
