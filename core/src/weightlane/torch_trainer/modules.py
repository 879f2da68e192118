"""A trainer's module as named plain tensors, looked up afresh each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightlane.errors import ExportError
from weightlane.export.paths import cleaned_keys, unwrapped
from weightlane.packing import is_freed, is_plain, kind_of

if TYPE_CHECKING:
    from torch import Tensor


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their path in the module tree, without a copy.

    `model` is a torch module (what DistributedDataParallel, torch.compile and activation checkpointing put
    around modules is no part of a path), a mapping of names to tensors, or None on a rank that holds nothing.
    Tied tensors appear under each of their names.

    Raises:
        ExportError: something is not a plain tensor (an FSDP or tensor-parallel shard, extra state).
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        found: dict[str, Any] = dict(model)
    elif isinstance(model, torch.nn.Module):
        _refuse_flat_shards(model)
        inside = unwrapped(model)
        state = inside.state_dict(keep_vars=True)
        found = {clean: state[key] for key, clean in cleaned_keys(inside, state).items()}
    else:
        raise ExportError(
            f"A trainer model of type {type(model).__name__} cannot be exported.",
            "The torch trainer takes a torch.nn.Module, a mapping of names to tensors, or None.",
            "Pass one of these as model=.",
        )
    for name, tensor in found.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and is_freed(tensor):
            raise freed(name)
        if not is_plain(tensor):
            raise ExportError(
                f"{name} is {kind_of(tensor)}, not a plain tensor with data.",
                "The torch trainer exports whole tensors; shards and wrappers need a trainer that gathers.",
                "Use wl.trainer('fsdp', ...) for FSDP modules, or exclude the entry.",
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def freed(name: str) -> ExportError:
    """What to raise for a tensor whose owner let go of its memory."""
    return ExportError(
        f"The memory of {name} was freed.",
        "The trainer is offloaded, and what it held is no longer there to be read.",
        "Load it again before connect and before each sync.",
    )


def _refuse_flat_shards(model: torch.nn.Module) -> None:
    # Asking FSDP 1 for its state dict is a collective, and describing must not start one.
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ExportError(
                f"{name or 'The model'} is wrapped by FullyShardedDataParallel.",
                "The torch trainer exports whole tensors and gathers no shards.",
                "Use wl.trainer('fsdp', ...).",
            )
