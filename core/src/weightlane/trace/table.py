"""The placement table: for one worker, which elements of which source land where. Serialisable, no torch.

Offsets and strides count elements. A source is taken as contiguous in its own logical shape; a target is
addressed from its own first element, with the strides that it has in the engine.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec
import xxhash

TargetKind: TypeAlias = Literal["parameter", "buffer", "attribute"]

TargetForm: TypeAlias = Literal["live", "checkpoint"]
"""`live`: the engine holds the target with this very shape, stride and dtype. `checkpoint`: what was written
to is the form in which the engine loads it; the live tensor is made from it afterwards."""

ObstacleKind: TypeAlias = Literal[
    "computed",
    "staged",
    "value-dependent",
    "rebound",
    "overwritten",
    "foreign",
    "changed-source",
    "thread",
    "per-call",
    "untraceable",
    "error",
]
"""Why a write is no plain placement.

computed: the value is calculated from sources. staged: it goes through a temporary tensor. value-dependent:
the loader reads a value to decide what to do. rebound: the loader put another tensor in the target's place.
overwritten: a placed element is filled or overwritten later. foreign: a tensor outside of the model's own
would have been written. changed-source: the loader changed a checkpoint tensor in place. thread: a thread
that ran before, or that goes on after it, takes part in the load, and not all that it does can be seen.
per-call: the loader needs it in one call with others, and a sync is one call for each bucket. untraceable:
the model holds something that no twin can stand for, and was not touched. error: the loader raised.
"""


class TableKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a table is true for. Two workers with equal keys, sources and shapes have the same table."""

    engine: str
    engine_version: str
    architecture: str
    worker: int = 0
    workers: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    lora: bool = False


class TracedSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint tensor: its canonical name, the name that the loader was given, full shape and dtype."""

    canonical: str
    wire: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


class TracedTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receiver tensor: its first name, its other names, and why it need not be written ("" if it must be).

    `storage` numbers the live memory it lies in, `offset` is its first element there: targets that overlap
    share a number.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    kind: TargetKind
    storage: int
    offset: int = 0
    aliases: tuple[str, ...] = ()
    owned: str = ""
    form: TargetForm = "live"

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


class Placement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements of source number `source` that land in target number `target`.

    `axes` are (size, source stride, target stride), outermost first in the target and coalesced; no axes mean
    one element. `casts` are the dtypes that a value passes through after the source's own.
    """

    source: int
    target: int
    source_offset: int
    target_offset: int
    axes: tuple[tuple[int, int, int], ...]
    casts: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """How many elements it places."""
        return math.prod(axis[0] for axis in self.axes)


class Fill(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements of target number `target` that the loader sets to a constant: padding. `axes`: size, step."""

    target: int
    offset: int
    axes: tuple[tuple[int, int], ...]
    value: float


class Obstacle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something the loader did that is no plain placement; `operator` is torch's name for it."""

    kind: ObstacleKind
    operator: str
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    detail: str = ""


class Untraced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="untraced"):
    """Why a worker or a replica has no table, in one sentence; a plan shows it beside its coverage."""

    reason: str


class PlacementTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one run of a worker's loader did, with the sources' names in one `style`."""

    key: TableKey
    style: str
    sources: tuple[TracedSource, ...]
    targets: tuple[TracedTarget, ...]
    placements: tuple[Placement, ...]
    fills: tuple[Fill, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    seconds: float = 0.0

    def digest(self) -> str:
        """Sixteen hex digits over all but the time it took."""
        same = msgspec.structs.replace(self, seconds=0.0)
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(same))

    def targets_of(self) -> dict[str, tuple[str, ...]]:
        """Per canonical name, the targets that it reaches, in the order of the targets."""
        reached: list[set[int]] = [set() for _ in self.sources]
        for item in self.placements:
            reached[item.source].add(item.target)
        return {
            source.canonical: tuple(self.targets[number].name for number in sorted(numbers))
            for source, numbers in zip(self.sources, reached, strict=True)
        }


class LiveHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker holds where its table says: hashes, never values; made after a load.

    `table` is the table's digest. `placements` has one xxh3 (64 bits) per placement of it, over the bytes of
    the live elements in the placement's order; `filled` one number per fill, of elements that no placement
    overwrites and that were compared with its constant. Both are 0 where the target is kept in another form
    than it is loaded, or is named in `changed`: targets, by number, with what became of them. `unlike` are
    the numbers of the fills that hold another value.
    """

    table: str
    placements: tuple[int, ...]
    filled: tuple[int, ...] = ()
    unlike: tuple[int, ...] = ()
    changed: dict[int, str] = {}
