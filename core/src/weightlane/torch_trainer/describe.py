"""What one rank holds in the phase that is exported, and its part of the manifest."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from weightlane.errors import ExportError
from weightlane.manifest import RankManifest, TensorSpec
from weightlane.packing import dtype_name
from weightlane.torch_trainer.modules import named_tensors
from weightlane.types import Phase

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.contexts import ExportContext

PLACEMENTS = ("replicated", "partitioned")


def held_tensors(context: ExportContext) -> dict[str, Tensor]:
    """What this rank exports, under canonical names, without a copy: the whole state, or an adapter.

    Raises:
        ExportError: see `named_tensors` and `adapter_tensors`.
    """
    if context.phase is Phase.ADAPTER:
        from weightlane.torch_trainer.adapter import adapter_tensors

        return adapter_tensors(context)
    return named_tensors(context.model)


def describe(context: ExportContext) -> RankManifest:
    """This rank's manifest, in the order of its module tree. No collective."""
    placement = context.options.get("placement", "replicated")
    if placement not in PLACEMENTS:
        raise ExportError(
            f"placement={placement!r} is unknown.",
            f"It is one of {', '.join(PLACEMENTS)}.",
            "Correct trainer(...).",
        )
    if "adapter" in context.options and context.phase is not Phase.ADAPTER:
        raise ExportError(
            f"adapter={context.options['adapter']!r} was given with phase {context.phase.value}.",
            "An adapter is named in mode adapter alone.",
            "Leave it out, or connect with mode='adapter'.",
        )
    tensors = held_tensors(context)
    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        storage = (
            tensor.device,
            tensor.dtype,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            # A view that is negated or conjugated when it is read has other values at the same place.
            tensor.is_neg(),
            tensor.is_conj(),
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
        base=_base_digests(context),
    )


def _base_digests(context: ExportContext) -> dict[str, str]:
    """What the adapter was trained on, by value; nothing in other phases, which send it all."""
    if context.phase is not Phase.ADAPTER:
        return {}
    from weightlane.base_digest import value_digests
    from weightlane.torch_trainer.adapter import base_tensors

    return value_digests(base_tensors(context))
