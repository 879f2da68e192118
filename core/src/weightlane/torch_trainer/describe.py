"""What one rank holds: its named tensors, looked up afresh each time, and its part of the manifest."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightlane.errors import ExportError
from weightlane.manifest import RankManifest, TensorSpec
from weightlane.packing import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.contexts import ExportContext

PLACEMENTS = ("replicated", "partitioned")
_WRAPPERS = ("module", "_orig_mod")


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers under checkpoint names, without a copy.

    `model` is a torch module (DistributedDataParallel and torch.compile wrappers are taken off), a mapping
    of names to tensors, or None on a rank that holds nothing. Tied tensors appear under each of their names.

    Raises:
        ExportError: something is not a plain tensor (an FSDP or tensor-parallel shard, extra state).
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        found: dict[str, Any] = dict(model)
    elif isinstance(model, torch.nn.Module):
        found = _unwrapped(model).state_dict(keep_vars=True)
    else:
        raise ExportError(
            f"A trainer model of type {type(model).__name__} cannot be exported.",
            "The torch trainer takes a torch.nn.Module, a mapping of names to tensors, or None.",
            "Pass one of these as model=.",
        )
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor") or tensor.is_meta:
            raise ExportError(
                f"{name} is {_kind(tensor)}, not a plain tensor with data.",
                "The torch trainer exports whole tensors; shards and wrappers need a trainer plugin that gathers.",
                "Use wl.trainer('fsdp', ...) for FSDP modules, or exclude the entry.",
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def describe(context: ExportContext) -> RankManifest:
    """This rank's manifest, in the order of its module tree. No collective."""
    placement = context.options.get("placement", "replicated")
    if placement not in PLACEMENTS:
        raise ExportError(
            f"placement={placement!r} is unknown.",
            f"It is one of {', '.join(PLACEMENTS)}.",
            "Correct trainer(...).",
        )
    tensors = named_tensors(context.model)
    owners: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        storage = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )
        owner = owners.setdefault(storage, name)
        if owner != name:
            aliases[name] = owner
    devices = {tensor.device.type for tensor in tensors.values()}
    return RankManifest(
        rank=context.rank,
        world_size=context.world_size,
        phase=context.phase,
        tensors=tuple(
            TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in tensors.items()
        ),
        replicated=placement == "replicated",
        collective=placement == "partitioned" and context.world_size > 1,
        aliases=aliases,
        host=socket.gethostname(),
        device=devices.pop() if len(devices) == 1 else "cpu",
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        inner = next(
            (model._modules[name] for name in _WRAPPERS if list(model._modules) == [name] and _wraps(model)),
            None,
        )
        if inner is None:
            return model
        model = inner


def _wraps(model: torch.nn.Module) -> bool:
    return (
        isinstance(model, torch.nn.parallel.DistributedDataParallel)
        or type(model).__name__ == "OptimizedModule"
    )


def _kind(tensor: object) -> str:
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return "a tensor on the meta device"
    return f"a {type(tensor).__name__}"
