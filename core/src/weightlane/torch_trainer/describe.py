"""What one rank holds in the phase that is exported, and its part of the manifest."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from weightlane.errors import ExportError
from weightlane.gpu_identity import gpu_uuid
from weightlane.manifest import RankManifest, TensorSpec
from weightlane.torch_trainer.exported import exported
from weightlane.types import Phase

if TYPE_CHECKING:
    from weightlane.contexts import ExportContext
    from weightlane.torch_trainer.exported import Exported

PLACEMENTS = ("replicated", "partitioned")


def describe(context: ExportContext) -> RankManifest:
    """This rank's manifest, in the order of its module tree. No collective."""
    placement = context.options.get("placement", "replicated")
    if placement not in PLACEMENTS:
        raise ExportError(
            f"placement={placement!r} is unknown.",
            f"It is one of {', '.join(PLACEMENTS)}.",
            "Correct trainer(...).",
        )
    if context.options.get("adapter") is not None and context.phase is Phase.FULL:
        raise ExportError(
            f"adapter={context.options['adapter']!r} was given with phase {context.phase.value}.",
            "An adapter is named in modes adapter and merged alone.",
            "Leave it out, or connect with mode='adapter' or mode='merged'.",
        )
    found = exported(context)
    devices = {tensor.device for tensor in found.tensors.values()}
    device = devices.pop() if len(devices) == 1 else None
    return RankManifest(
        rank=context.rank,
        world_size=context.world_size,
        phase=context.phase,
        tensors=tuple(TensorSpec(name, recipe.shape, recipe.dtype) for name, recipe in found.recipes.items()),
        replicated=placement == "replicated",
        collective=placement == "partitioned" and context.world_size > 1,
        aliases=aliases_of(found),
        host=socket.gethostname(),
        device=device.type if device else "cpu",
        gpu_uuid=gpu_uuid(device) if device else "",
        base=_base_digests(context),
    )


def aliases_of(found: Exported) -> dict[str, str]:
    """Names whose tensor is another's, by where it lies or, where it is computed, by what it is made of."""
    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, recipe in found.recipes.items():
        if len(recipe.sources) > 1:
            if recipe.alias_of:
                aliases[name] = recipe.alias_of
            continue
        tensor = found.made(name)
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
    return aliases


def _base_digests(context: ExportContext) -> dict[str, str]:
    """What the adapter was trained on, by value; nothing in other phases, which send it all."""
    if context.phase is not Phase.ADAPTER:
        return {}
    from weightlane.base_digest import value_digests
    from weightlane.torch_trainer.adapter import base_tensors

    return value_digests(base_tensors(context))
