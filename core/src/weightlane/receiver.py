"""What a receiver tells about itself: its live tensors and the checkpoint it expects."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weightlane.facts import EngineFacts

TensorKind: TypeAlias = Literal["parameter", "buffer"]


class LiveTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as it stands in one worker: the engine's own name and the local (shard) shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind = "parameter"


class ExpectedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the checkpoint that the engine's model is loaded from.

    `shape` is the full logical shape. `dtype` is the receiver's live dtype, or "" where it cannot be known.
    `tied_to` names the tensor whose storage this one shares: it may be absent from a sync, and is dropped
    with that reason when present.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    tied_to: str = ""


class WorkerDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine worker as its agent, or the controller on its behalf, sees it.

    `incarnation` changes whenever the process or the model in it is made anew. `packed` maps a fused
    receiver module to the checkpoint modules that it holds, `renames` a checkpoint prefix to the
    receiver's, both as the engine's model class declares them.
    """

    worker: int
    workers: int
    host: str
    process_id: int
    incarnation: str
    device: str = "cpu"
    gpu_uuid: str = ""
    held_version: int | None = None
    servable: bool = True
    live: tuple[LiveTensor, ...] = ()
    expected: tuple[ExpectedTensor, ...] = ()
    packed: dict[str, tuple[str, ...]] = {}
    renames: dict[str, str] = {}
    facts: EngineFacts | None = None


class NameEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one exported tensor goes.

    `wire` is the name handed to the receiver's loader, `targets` the receiver tensors it is known to reach
    (empty when unknown), `rule` what decided. `dropped` gives the reason when it is not sent at all.
    `dtype` is what travels.
    """

    canonical: str
    wire: str
    dtype: str
    targets: tuple[str, ...] = ()
    rule: str = ""
    dropped: str = ""
