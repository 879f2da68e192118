"""One rank of a partitioned export over gloo, and the contexts that a stream needs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightlane.buckets import lay_out_buckets
from weightlane.contexts import ExportContext, StreamContext
from weightlane.errors import ExportError
from weightlane.manifest import DTYPE_BYTES, Manifest
from weightlane.packing import dtype_name, memory_of, torch_dtype
from weightlane.receiver import NameEntry
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.export import TorchStream
from weightlane.torch_trainer.plugin import TORCH
from weightlane.types import Phase

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from weightlane.manifest import RankManifest


def export_context(model: Any, *, rank: int = 0, world_size: int = 1, **options: Any) -> ExportContext:
    return ExportContext(TORCH, model, Phase.FULL, rank, world_size, options)


def stream_of(
    export: ExportContext,
    manifest: Manifest,
    *,
    serving: tuple[int, ...] = (0,),
    drop: tuple[str, ...] = (),
    group: Any = None,
) -> TorchStream:
    from weightlane.plan import wire_tensors

    entries = tuple(
        NameEntry(spec.name, spec.name, spec.dtype, dropped="asked for" if spec.name in drop else "")
        for spec in manifest.tensors
    )
    tensors = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    return TorchStream(
        StreamContext(
            export=export,
            manifest=manifest,
            entries=entries,
            tensors=tensors,
            buckets=lay_out_buckets(tensors, bucket_bytes=256),
            group=group,
            serving_ranks=serving,
            wanted=export.rank in serving,
        )
    )


def some_of_every_dtype(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for dtype in sorted(DTYPE_BYTES):
        for shape in ((3, 5), (), (0, 2)):
            count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
            highest = 2 if dtype == "bool" else 256
            data = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=generator)
            found[f"{dtype}{list(shape)}"] = data.view(torch_dtype(dtype)).reshape(shape)
    found["strided"] = torch.arange(24, dtype=torch.int32).reshape(4, 6).t()[::2]
    return found


def as_bytes(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return dtype_name(tensor.dtype), tuple(tensor.shape), bytes(memory_of(tensor.contiguous()))


def held_by(rank: int, world_size: int, seed: int) -> dict[str, Tensor]:
    """Every second tensor on each rank; `strided` on all."""
    return {
        name: tensor
        for number, (name, tensor) in enumerate(some_of_every_dtype(seed).items())
        if number % world_size == rank or name == "strided"
    }


def streams_partitioned(
    pipe: Connection, address: str, rank: int, world_size: int, serving: tuple[int, ...]
) -> None:
    """Describes, merges, streams twice with changed values, and tells all it was given."""
    from weightlane.manifest import merge_rank_manifests

    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    model = held_by(rank, world_size, seed=0)
    export = export_context(model, rank=rank, world_size=world_size, placement="partitioned")
    parts: list[RankManifest] = [None] * world_size  # type: ignore[list-item]
    dist.all_gather_object(parts, describe(export))
    manifest, problems = merge_rank_manifests(parts)
    assert manifest is not None, problems
    names = [spec.name for spec in manifest.tensors]
    stream = stream_of(export, manifest, serving=serving, group=dist.group.WORLD)
    assert stream.collective
    for seed in (0, 1):
        model.update(held_by(rank, world_size, seed))
        given: dict[str, Any] = {}
        buckets = 0
        with stream:
            for bucket in stream:
                buckets += 1
                given.update((names[number], as_bytes(tensor)) for number, tensor in bucket)
        pipe.send((buckets, given))
    pipe.recv()
    dist.destroy_process_group()


def changed_since_connect(model: dict[str, Tensor], manifest: Manifest) -> str:
    try:
        with stream_of(export_context(model), manifest) as stream:
            list(stream)
    except ExportError as error:
        return str(error)
    return ""
