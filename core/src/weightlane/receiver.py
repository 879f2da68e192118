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


class NameRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine's loader reads names, beyond `packed` and `renames`; as its model declares it.

    `patterns` (regular expressions), `substrings` and `suffixes` map a piece of a checkpoint name to the
    receiver's, or to None where the loader passes over such names; `stacked` maps a piece of a name to that
    of the fused module. `wrapper_loads`: a LoRA wrapper takes the plain names of the layer that it wraps.
    `expert_prefix` is what fused experts inside a LoRA wrapper are read with before the last part of a name
    ("" for nothing).
    """

    patterns: dict[str, str | None] = {}
    substrings: dict[str, str | None] = {}
    stacked: dict[str, str] = {}
    suffixes: dict[str, str | None] = {}
    wrapper_loads: bool = True
    expert_prefix: str = ""


class BeyondExpected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who in a worker takes tensors that its expected checkpoint does not hold, such as a drafter.

    `taker` names it in a message, and its tensors' names in a table begin with `prefix`. `left_out` says what
    to do where not all of them are exported.
    """

    taker: str
    prefix: str
    left_out: str


class WorkerDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine worker as its agent, or the controller on its behalf, sees it.

    `incarnation` changes whenever the process or the model in it is made anew. `packed` maps a fused
    receiver module to the checkpoint modules that it holds, `renames` a checkpoint prefix to the
    receiver's, both as the engine's model class declares them; `rules` holds whatever else it declares.
    `beyond` is None where every name that is not in `expected` is refused. Where it is not, a trace decides:
    such a name is handed to the loader in the shape that is exported, and refused if nothing takes it.
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
    rules: NameRules = NameRules()
    beyond: BeyondExpected | None = None


UNKNOWN = "unknown"
"""The rule of a name that reaches nothing, for the plan to refuse."""


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
