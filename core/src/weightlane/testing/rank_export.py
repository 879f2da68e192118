"""A trainer plugin's export on all ranks without an engine: what connect makes of it, and its buckets.

For contract tests and benchmarks of trainer plugins. Every rank of the default process group calls it alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weightlane.buckets import DEFAULT_BUCKET_BYTES, lay_out_buckets
from weightlane.contexts import ExportContext, StreamContext
from weightlane.errors import PlanError
from weightlane.lane_groups import make_groups
from weightlane.manifest import merge_rank_manifests
from weightlane.plan import wire_tensors
from weightlane.receiver import NameEntry
from weightlane.types import Phase
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from typing_extensions import Self

    from weightlane.manifest import Manifest
    from weightlane.types import BackendDescriptor


@dataclass(frozen=True, slots=True)
class Wished:
    """What a user would ask of connect, and a bound for each collective in seconds.

    `serving` are the ranks that send; None for all.
    """

    phase: Phase = Phase.FULL
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    serving: tuple[int, ...] | None = None
    seconds: float = 60.0
    check: Callable[[], None] = nothing_to_check
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankExport:
    """One rank's end of an export; `sync` streams it as often as it is called. Leaving it ends its groups."""

    plugin: Any
    context: StreamContext

    @property
    def manifest(self) -> Manifest:
        """The agreed one."""
        return self.context.manifest

    def sync(self) -> dict[str, Tensor]:
        """Every tensor that this rank was given, by checkpoint name; none on a rank that only drains."""
        given: dict[str, Tensor] = {}
        names = [wire.name for wire in self.context.tensors]
        with self.plugin.weightlane_export_params(self.context) as stream:
            for bucket in stream:
                given.update((names[number], tensor) for number, tensor in bucket)
        return given

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Each gloo group has threads of its own, which would add up."""
        groups = {id(group): group for group in (self.context.group, *self.context.groups.values())}
        for group in groups.values():
            if group is not None:
                dist.destroy_process_group(group)


def export_of(plugin: Any, descriptor: BackendDescriptor, model: Any, wished: Wished) -> RankExport:
    """Describes on every rank, agrees, lays out buckets, and makes the groups.

    Args:
        plugin: a trainer plugin's module or object.
        descriptor: of its backend.
        model: this rank's.
        wished: the same on all ranks.

    Raises:
        PlanError: the ranks do not agree.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    export = ExportContext(descriptor, model, wished.phase, rank, world, wished.options)
    parts: list[Any] = [None] * world
    described = plugin.weightlane_describe_export(export)
    # Bounded by the timeout of the default group, which is the test's or the benchmark's own.
    dist.all_gather_object(parts, described)
    manifest, problems = merge_rank_manifests(parts)
    if manifest is None:
        raise PlanError(problems)
    entries = tuple(NameEntry(spec.name, spec.name, spec.dtype) for spec in manifest.tensors)
    tensors = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    groups = make_groups(manifest, wished.seconds)
    serving = tuple(range(world)) if wished.serving is None else wished.serving
    context = StreamContext(
        export=export,
        manifest=manifest,
        entries=entries,
        tensors=tensors,
        buckets=lay_out_buckets(tensors, bucket_bytes=wished.bucket_bytes),
        group=groups.everyone,
        serving_ranks=serving,
        wanted=rank in serving,
        groups=groups.parts,
        collective_seconds=wished.seconds,
        check=wished.check,
    )
    return RankExport(plugin, context)
