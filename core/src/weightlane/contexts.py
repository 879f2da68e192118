"""The frozen contexts that hooks receive. Fields are only ever added; a hook reads what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from weightlane.adapters import SwapPolicy
    from weightlane.buckets import BucketLayout
    from weightlane.facts import EngineFacts
    from weightlane.manifest import Manifest, TensorSpec
    from weightlane.messages import WireTensor
    from weightlane.peft import AdapterConfig
    from weightlane.receiver import NameEntry, WorkerDescription
    from weightlane.trace.table import PlacementTable
    from weightlane.types import (
        BackendDescriptor,
        MemoryTag,
        Mode,
        Phase,
        RequestPolicy,
        TransportName,
        VerifyLevel,
    )


@dataclass(frozen=True, slots=True)
class RolloutTarget:
    """How the user names one replica: an address, or an engine object in this process, never both.

    `address` is `unix:/path` or `tcp:host:port` (a weightlane front) or an `http(s)://` URL. `model` is the
    folder of the checkpoint that the engine was started from, for engines that cannot be asked.
    """

    engine: str
    address: str = ""
    handle: Any = None
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FactsContext:
    """For `weightlane_collect_facts`: a target to ask, or no target: look at what is installed.

    `search_path` holds the folders of another environment on this machine in which to look
    (`weightlane.installations`); empty means this process's own.
    """

    engine: str
    distributions: tuple[str, ...]
    target: RolloutTarget | None = None
    search_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """For `weightlane_plan_launch`: what the lane will need, before the engine starts.

    `facts.device` is "cpu" for an engine that is to use no GPU. `address` is where a lane is to reach it, ""
    for what the plugin proposes. `swap` is how the lane will swap adapters (mode adapter): the engine needs
    `weightlane.adapters.SLOTS_NEEDED` of them. `lora_rank` is the largest rank of their modules, 0 where it
    was not told. `release` is the memory that the lane will let go and take back.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    mode: Mode
    model: str
    tensor_parallel: int = 1
    address: str = ""
    swap: SwapPolicy = "two_slot"
    lora_rank: int = 0
    release: tuple[MemoryTag, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start the engine so that a lane can reach it.

    `arguments` are all that the interpreter of the engine's environment is given, beginning with
    `-m MODULE`; `environment` are variables added for it. `address` is where a lane then reaches the engine.
    `requires` are distributions that this environment must hold besides the engine.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    address: str = ""
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportContext:
    """For `weightlane_describe_export`: one rank's model and how it is to be exported."""

    descriptor: BackendDescriptor
    model: Any
    phase: Phase
    rank: int
    world_size: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeftConfigContext:
    """For `weightlane_normalize_peft_config`: one rank's export, and the adapter tensors it described."""

    descriptor: BackendDescriptor
    export: ExportContext
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ExpressAdapterContext:
    """For `weightlane_express_adapter`: the agreed adapter and the engine that is to take it.

    `swap` is the policy that the user chose; an engine that cannot keep it refuses with a PlanError.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    adapter: AdapterConfig
    workers: tuple[WorkerDescription, ...]
    swap: SwapPolicy = "two_slot"


@dataclass(frozen=True, slots=True)
class StreamContext:
    """For `weightlane_export_params`: the agreed manifest and buckets, and the group made for this lane.

    `entries` is aligned with `manifest.tensors`; `tensors` are those that travel, in the same order. `group`
    is None when the manifest needs no collective. `wanted` is False on a rank that only drains: it takes part
    in collectives and may skip its own copies. `groups` are those of `manifest.groups` that this rank is in.
    A stream waits for no collective longer than `collective_seconds`, and calls `check` while it waits: that
    raises when another rank failed, so that a rank that left ends the sync of all.
    """

    export: ExportContext
    manifest: Manifest
    entries: tuple[NameEntry, ...]
    tensors: tuple[WireTensor, ...]
    buckets: tuple[BucketLayout, ...]
    group: ProcessGroup | None
    serving_ranks: tuple[int, ...]
    wanted: bool
    groups: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict)
    collective_seconds: float = DEFAULT_BOUNDS.collective
    check: Callable[[], None] = nothing_to_check


@dataclass(frozen=True, slots=True)
class MapNamesContext:
    """For `weightlane_map_names`: the agreed manifest and one worker's own description of itself.

    `table` is what that worker's loader was seen to do with the manifest's tensors, tied ones left out; None
    where no trace could be made, so that static rules must do.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    manifest: Manifest
    worker: WorkerDescription
    table: PlacementTable | None = None


@dataclass(frozen=True, slots=True)
class TraceModelContext:
    """For `weightlane_trace_model`: a checkpoint folder, the tensors that would be sent, and the layout.

    `model` holds a `config.json`; weights need not be there. `tensors` have canonical names, full shapes and
    dtypes; tied ones are left out. `lora`: the engine would run with LoRA enabled.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    model: str
    tensors: tuple[WireTensor, ...]
    tensor_parallel: int = 1
    lora: bool = False


@dataclass(frozen=True, slots=True)
class BuildRequestsContext:
    """For `weightlane_build_requests` and `weightlane_plan_lifecycle`: one replica, fully planned.

    `release` lists the memory that the lane is to let go while the engine does not generate. `swap` is how
    the adapter is swapped, in phase ADAPTER. `requests` is what is to become of requests that run, None for
    what the backend does by itself; where they are waited for, for `drain_seconds` at most.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    phase: Phase
    transport: TransportName
    tensors: tuple[WireTensor, ...]
    buckets: tuple[BucketLayout, ...]
    workers: tuple[WorkerDescription, ...]
    verify: VerifyLevel
    release: tuple[MemoryTag, ...] = ()
    swap: SwapPolicy | None = None
    requests: RequestPolicy | None = None
    drain_seconds: float = DEFAULT_BOUNDS.drain


@dataclass(frozen=True, slots=True)
class TrainerLifecycleContext:
    """For `weightlane_plan_lifecycle` of a trainer backend: the agreed manifest, and `trainer`'s options."""

    descriptor: BackendDescriptor
    manifest: Manifest
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentContext:
    """For `weightlane_worker_agent`: the engine's own worker object, inside the engine's worker process."""

    descriptor: BackendDescriptor
    worker: Any


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """For `weightlane_open_endpoint`."""

    descriptor: BackendDescriptor
    target: RolloutTarget
    timeout_seconds: float


__all__ = [
    "AgentContext",
    "BuildRequestsContext",
    "EndpointContext",
    "ExportContext",
    "ExpressAdapterContext",
    "FactsContext",
    "LaunchContext",
    "LaunchPlan",
    "MapNamesContext",
    "PeftConfigContext",
    "RolloutTarget",
    "StreamContext",
    "TraceModelContext",
    "TrainerLifecycleContext",
]
