"""One rank's part of the manifest: names and global shapes from its own records, no collective."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from weightlane.gpu_identity import gpu_uuid
from weightlane.manifest import RankManifest, TensorSpec
from weightlane_fsdp.export import read_export

if TYPE_CHECKING:
    from weightlane.contexts import ExportContext
    from weightlane_fsdp.export import Export


def describe(context: ExportContext) -> RankManifest:
    """Names, global shapes and dtypes in the order of the stream, and the groups it gathers in.

    Raises:
        ExportError: see `read_export`.
    """
    export = read_export(context)
    on_gpu = export.device.type == "cuda"
    return RankManifest(
        rank=context.rank,
        world_size=context.world_size,
        phase=context.phase,
        tensors=tuple(TensorSpec(item.name, item.shape, item.dtype) for item in export.recipes),
        # Also where every rank holds everything: ranks must agree on what nothing keeps equal.
        collective=context.world_size > 1,
        aliases=aliases_of(export),
        host=socket.gethostname(),
        device=export.device.type,
        gpu_uuid=gpu_uuid(export.device),
        group_backend="nccl" if on_gpu else "gloo",
        groups=tuple({item.ranks: None for item in export.used if item.ranks}),
    )


def aliases_of(export: Export) -> dict[str, str]:
    """Names that are one storage: the recipes' own, and any other two of one source, as it is.

    FSDP1 hides from the recipes that two of its parameters are one.
    """
    owners: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for item in export.recipes:
        if item.alias_of:
            aliases[item.name] = item.alias_of
        if item.alias_of or len(item.sources) != 1:
            continue
        held = export.held[item.sources[0]]
        if (item.shape, item.dtype) != (held.source.shape, held.source.dtype):
            continue
        owner = owners.setdefault(held.tie, item.name)
        if owner != item.name:
            aliases[item.name] = owner
    return aliases
