"""The manifest: what a trainer exports, the same typed object over every transport."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import xxhash

from weightlane.adapter_agreement import agreed_adapter, agreed_base
from weightlane.errors import Problem
from weightlane.peft import AdapterConfig
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

GroupBackend: TypeAlias = Literal["gloo", "nccl"]
"""Over what a trainer's ranks gather: gloo for bytes on the CPU, NCCL for bytes on GPUs."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every dtype that may travel, by torch's own names without the `torch.` prefix.

What torch itself cannot copy (`int1` to `int7`, `uint1` to `uint7`) and quantised dtypes, whose scale is not
in their bytes, are not among them. An element of `float4_e2m1fn_x2` is a pair, as torch counts it."""

FLOATING: frozenset[str] = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes between which a receiver's loader casts; any other difference is a planning error."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One exported tensor under its canonical (checkpoint) name.

    `shape` is the full logical shape, never a shard's; `holders` the trainer ranks that can give it whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    holders: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-dim tensor, 0 when a dimension is 0."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the dense tensor."""
        return self.elements * DTYPE_BYTES[self.dtype]


class RankManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one trainer rank exports, in its own order.

    `replicated` says that every rank must hold the same tensors; otherwise a tensor may live on some ranks
    only. `aliases` maps a name that shares storage with another exported name to that name. `adapter` and
    `base` belong to phase ADAPTER: what the tensors are, and the digest of each base tensor that is not sent.
    `groups` are the sets of ranks, this one among them, in which its export gathers besides the one of all
    ranks; the lane makes them at connect, with `group_backend`, so that they can be given up without harm to
    a group of the user's. `gpu_uuid` is the GPU that all of its tensors come from, "" where there is no such.
    """

    rank: int
    world_size: int
    phase: Phase
    tensors: tuple[TensorSpec, ...]
    replicated: bool = True
    collective: bool = False
    aliases: dict[str, str] = {}
    host: str = ""
    device: str = "cpu"
    adapter: AdapterConfig | None = None
    base: dict[str, str] = {}
    group_backend: GroupBackend = "gloo"
    groups: tuple[tuple[int, ...], ...] = ()
    gpu_uuid: str = ""


class TrainedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter as the trainer holds it, where a lane moves it in another form."""

    adapter: AdapterConfig
    tensors: tuple[TensorSpec, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agreed export of all ranks; `tensors` is the order in which every rank yields.

    `trained` is there where an adapter travels in its normal form: `tensors` and `adapter` are then those of
    that form, made on each rank of what `trained` lists (`weightlane.normal_stream`).
    """

    phase: Phase
    world_size: int
    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = {}
    collective: bool = False
    adapter: AdapterConfig | None = None
    base: dict[str, str] = {}
    trained: TrainedAdapter | None = None
    group_backend: GroupBackend = "gloo"
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one sync before any cast."""
        return sum(spec.nbytes for spec in self.tensors)

    def digest(self) -> str:
        """Sixteen hex digits that two processes can compare to know that they hold the same manifest."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self))


def merge_rank_manifests(parts: Sequence[RankManifest]) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """Joins the ranks' manifests into the agreed one, or tells every disagreement at once.

    Order is rank 0's, then whatever only later ranks hold, in rank order, so that every rank that holds all
    tensors walks them in the order of its own module tree.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    if not ordered:
        return None, (Problem("rank-disagreement", "ranks", "no trainer rank described its export"),)
    first = ordered[0]
    specs: dict[str, TensorSpec] = {}
    holders: dict[str, list[int]] = {}
    problems = _check_ranks(ordered)
    for part in ordered:
        problems += _add_part(part, specs, holders)
    if first.replicated:
        problems += _check_replicas(ordered, holders)
    problems += _check_aliases(ordered)
    adapter, adapter_problems = agreed_adapter(ordered)
    base, base_problems = agreed_base(ordered)
    problems += adapter_problems + base_problems
    if problems:
        return None, tuple(problems)
    tensors = tuple(
        TensorSpec(name=name, shape=spec.shape, dtype=spec.dtype, holders=tuple(holders[name]))
        for name, spec in specs.items()
    )
    return (
        Manifest(
            phase=first.phase,
            world_size=first.world_size,
            tensors=tensors,
            aliases={name: target for part in ordered for name, target in part.aliases.items()},
            collective=any(part.collective for part in ordered) or not first.replicated,
            adapter=adapter,
            base=base,
            group_backend=first.group_backend,
            # In one order on all ranks, since making a group takes part of every rank.
            groups=tuple(sorted({tuple(sorted(group)) for part in ordered for group in part.groups})),
        ),
        (),
    )


def _check_ranks(ordered: Sequence[RankManifest]) -> list[Problem]:
    """Each rank once, all of them with the same mode and placement."""
    first = ordered[0]
    problems: list[Problem] = []
    ranks = [part.rank for part in ordered]
    if ranks != list(range(first.world_size)) or {part.world_size for part in ordered} != {first.world_size}:
        # Holders are ranks to broadcast from; a wrong one would end in a hang.
        problems.append(
            Problem(
                "rank-disagreement",
                "ranks",
                f"manifests came for rank {_ranks(ranks)} of world size "
                f"{_ranks(sorted({part.world_size for part in ordered}))}",
                "Report this to the trainer's plugin.",
            )
        )
    problems.extend(
        Problem(
            "rank-disagreement",
            f"rank {part.rank}",
            f"exports {part.phase.value} with replicated={part.replicated}, while rank {first.rank} "
            f"exports {first.phase.value} with replicated={first.replicated}",
            "Give every rank the same mode and placement.",
        )
        for part in ordered
        if (part.replicated, part.phase) != (first.replicated, first.phase)
    )
    problems.extend(
        Problem(
            "rank-disagreement",
            f"rank {part.rank}",
            f"would gather over {part.group_backend}, rank {first.rank} over {first.group_backend}",
            "Keep the model on the same kind of device on every rank.",
        )
        for part in ordered
        if part.group_backend != first.group_backend
    )
    problems.extend(
        Problem(
            "rank-disagreement",
            f"rank {part.rank}",
            f"would gather in a group of ranks {_ranks(group)}, of {len(ordered)} ranks in all",
            "Make the trainer's meshes of the ranks that call connect.",
        )
        for part in ordered
        for group in part.groups
        if not set(group) <= set(range(first.world_size)) or part.rank not in group
    )
    return problems


def _add_part(
    part: RankManifest, specs: dict[str, TensorSpec], holders: dict[str, list[int]]
) -> list[Problem]:
    """Adds one rank's tensors to what is known; tells what contradicts itself or an earlier rank."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for spec in part.tensors:
        if spec.name in seen:
            problems.append(Problem("duplicate-name", spec.name, f"rank {part.rank} exports this name twice"))
            continue
        seen.add(spec.name)
        if spec.dtype not in DTYPE_BYTES:
            problems.append(
                Problem("dtype", spec.name, f"rank {part.rank} holds dtype {spec.dtype}, which cannot travel")
            )
            continue
        known = specs.setdefault(spec.name, spec)
        if (known.shape, known.dtype) != (spec.shape, spec.dtype):
            problems.append(
                Problem(
                    "rank-disagreement",
                    spec.name,
                    f"rank {part.rank} holds {spec.dtype}{list(spec.shape)} but rank "
                    f"{holders[spec.name][0]} holds {known.dtype}{list(known.shape)}",
                )
            )
        holders.setdefault(spec.name, []).append(part.rank)
    return problems


def _check_replicas(ordered: Sequence[RankManifest], holders: dict[str, list[int]]) -> list[Problem]:
    problems: list[Problem] = []
    for name, ranks in holders.items():
        missing = [part.rank for part in ordered if part.rank not in ranks]
        if missing:
            problems.append(
                Problem(
                    "rank-disagreement",
                    name,
                    f"held by rank {_ranks(ranks)} but not by rank {_ranks(missing)}, and this trainer "
                    "says that its ranks are replicas",
                    "Hold it on every rank, or pass placement='partitioned' to the trainer.",
                )
            )
    return problems


def _check_aliases(ordered: Sequence[RankManifest]) -> list[Problem]:
    """Names that one rank ties must be tied on every rank that holds them: an alias may stay unsent."""
    problems: list[Problem] = []
    for part in ordered:
        for name, target in part.aliases.items():
            untied = [
                other.rank
                for other in ordered
                if {name, target} <= {spec.name for spec in other.tensors}
                and other.aliases.get(name, name) != other.aliases.get(target, target)
            ]
            if untied:
                problems.append(
                    Problem(
                        "rank-disagreement",
                        name,
                        f"shares storage with {target} on rank {part.rank} but not on rank {_ranks(untied)}",
                        "Tie or untie them on every rank.",
                    )
                )
    return problems


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
