"""Typed messages between controller, ranks, fronts and worker agents. msgpack by msgspec, never pickle.

Every union is tagged; unknown tags, unknown fields, missing fields and truncated bytes all end in
`ProtocolError` naming what was wrong.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from weightlane import errors
from weightlane.adapters import AdapterBinding, AdapterPlan, GenerationDuringSync, TrainedBase
from weightlane.buckets import BucketLayout
from weightlane.device_memory import DeviceMemoryHandle
from weightlane.facts import EngineFacts
from weightlane.failures import Failure
from weightlane.lane_owner import LaneOwner
from weightlane.receiver import WorkerDescription
from weightlane.residency import WorkerResidency
from weightlane.trace.table import PlacementTable, Untraced
from weightlane.types import Phase, ReadBackPolicy

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A bound of a wait. Infinity and NaN are refused: with them a wait would have no end."""

SyncNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 39)]
"""Counts a lane's syncs from 1; with a bucket's number it must fit a signed 64-bit word of a ring."""

# controller -> agent -----------------------------------------------------------------------------------


class WireTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as it travels: the name for the receiver's loader, full shape and travelling dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ReceivePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver needs once per lane: every tensor, the bucket layouts and the ring to read from.

    `ring` maps a worker number to the path of the ring that it reads (transports `shm` and `cuda_ipc`),
    `memory` to what it maps of its GPU (`cuda_ipc` only); `folder` is the lane's folder (`disk` only).
    `adapter` is there in phase ADAPTER alone, `base` in phase BASE. `owner` is the controller's process, if
    that is known. `canonical` maps a name that travels to the checkpoint's own, where the two differ.
    `tables` names, per worker, the placement table that the plan was made from; with it the worker reads back
    what it wrote, as often as `read_back` says.
    """

    lane: str
    plan_digest: str
    backend: str
    transport: str
    tensors: tuple[WireTensor, ...]
    buckets: tuple[BucketLayout, ...]
    ring: dict[int, str] = {}
    verify: str = "digest"
    folder: str = ""
    phase: Phase = Phase.FULL
    adapter: AdapterPlan | None = None
    base: TrainedBase | None = None
    owner: LaneOwner | None = None
    canonical: dict[str, str] = {}
    tables: dict[int, str] = {}
    read_back: ReadBackPolicy = "first"
    memory: dict[int, DeviceMemoryHandle] = {}


class Describe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe"):
    """Ask a worker for its `WorkerDescription`. `backend` names the plugin's backend to use there."""

    backend: str


class GetResidency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="get-residency"):
    """Ask a worker what it holds now; cheap, since it comes before each sync."""

    backend: str
    lane: str


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace"):
    """Ask a worker where its loader would put `tensors`, which have canonical names and full shapes.

    Writes nothing. Answered by `Traced`, or by `Untraced` where the loader cannot be run without data.
    """

    backend: str
    tensors: tuple[WireTensor, ...]


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attach"):
    """Give a worker the plan of a lane; checked against its live tensors before it answers."""

    plan: ReceivePlan


class Receive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="receive"):
    """Read one whole sync from the ring and load it. One long-running call per sync.

    `incarnation` is, per worker, the one the plan was made for; another one is refused before any write.
    `wait_seconds` bounds each wait for the next bucket, `lost_after_seconds` the silence of the sender.
    `generation` tells the front whether to hold generation back until the sync is published.
    """

    lane: str
    plan_digest: str
    sync: SyncNumber
    version: int
    incarnation: dict[int, str]
    wait_seconds: Seconds
    lost_after_seconds: Seconds
    generation: GenerationDuringSync = "held"


class BeginInline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin-inline"):
    """Open a sync whose buckets come by value in `LoadInline` messages."""

    lane: str
    plan_digest: str
    sync: SyncNumber
    version: int
    incarnation: dict[int, str]
    generation: GenerationDuringSync = "held"


class LoadInline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load-inline"):
    """One bucket by value; the layout is the plan's."""

    lane: str
    sync: SyncNumber
    bucket: int
    payload: bytes


class FinishInline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finish-inline"):
    """Close a sync opened by `BeginInline`; answered by a `ReceiveReport`."""

    lane: str
    sync: SyncNumber


class CheckResidency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="check-residency"):
    """Ask whether the worker still holds the plan and is the planned incarnation, before a sync is made."""

    lane: str
    plan_digest: str
    incarnation: dict[int, str]


class ReceiveDisk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="receive-disk"):
    """Load one whole sync from the folder `folder` below the lane's; answered by a `ReceiveReport`.

    `manifest_digest` is the xxh3 of the manifest that the trainer wrote there last.
    """

    lane: str
    plan_digest: str
    sync: SyncNumber
    version: int
    incarnation: dict[int, str]
    folder: str
    manifest_digest: str
    generation: GenerationDuringSync = "held"


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="publish"):
    """Every worker of every replica has verified: serve `version` from now on."""

    lane: str
    sync: SyncNumber
    version: int


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """A sync failed elsewhere; `cause` is kept and shown by whoever is refused because of it."""

    lane: str
    sync: SyncNumber
    cause: str


class Detach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="detach"):
    """The lane is closed; drop its plan and its ring."""

    lane: str


AgentRequest: TypeAlias = (
    Describe
    | GetResidency
    | Trace
    | Attach
    | Receive
    | BeginInline
    | LoadInline
    | FinishInline
    | CheckResidency
    | ReceiveDisk
    | Publish
    | Cancel
    | Detach
)

# agent -> controller -----------------------------------------------------------------------------------


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="described"):
    """Answer to `Describe`."""

    description: WorkerDescription


class Traced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="traced"):
    """Answer to `Trace`. The worker keeps the table for as long as its incarnation stands."""

    table: PlacementTable


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """Answer to a request that has nothing more to tell."""

    worker: int


class ReadBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker read back of one sync, all of it equal to what was sent.

    `elements` were compared; `not_comparable` lie in tensors of which the engine keeps another form than it
    loads, so that nothing can be said of them.
    """

    elements: int
    not_comparable: int = 0


class ReceiveReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """What one worker received and wrote in one sync.

    `tensors` and `nbytes` count what arrived, `loaded` what was handed to the engine's loader, `digest` is
    over the arrived bytes in plan order ("" at level `counts`), seconds are wall time. `adapter` is where the
    engine bound what it was given (phase ADAPTER), `read_back` what was found equal afterwards; None where
    nobody looked.
    """

    worker: int
    sync: int
    version: int
    tensors: int
    nbytes: int
    loaded: int
    digest: str
    wait_seconds: float
    load_seconds: float
    adapter: AdapterBinding | None = None
    read_back: ReadBack | None = None


AgentReply: TypeAlias = Described | WorkerResidency | Traced | Untraced | Done | ReceiveReport | Failure

# controller -> front -----------------------------------------------------------------------------------


class GetFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="get-facts"):
    """Ask a front for the facts of its engine."""


class CallWorkers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="call-workers"):
    """Carry one encoded `AgentRequest` to every worker; answered by one encoded reply per worker."""

    message: bytes
    timeout_seconds: Seconds


class CallEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="call-engine"):
    """One call of the engine itself, such as `pause` or `reset_prefix_cache`."""

    route: str
    timeout_seconds: Seconds = 60.0


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="generate"):
    """Greedy (`temperature` 0) or sampled continuation of token-id prompts, with log-probs.

    Each continuation has exactly `max_tokens` tokens: an end-of-text token does not end it. `adapter` is the
    name of a served adapter; "" leaves it to the engine.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    seed: int = 0
    adapter: str = ""


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shutdown"):
    """End the front's process after answering."""


FrontRequest: TypeAlias = GetFacts | CallWorkers | CallEngine | Generate | Shutdown


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="facts"):
    """Answer to `GetFacts`."""

    facts: EngineFacts


class WorkerReplies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="worker-replies"):
    """Answer to `CallWorkers`, in worker order."""

    replies: tuple[bytes, ...]


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One continuation: chosen token ids, their log-probs (natural log), and the version that made them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int | None = None


class Generations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="generations"):
    """Answer to `Generate`, in prompt order."""

    generations: tuple[Generation, ...]


class EngineAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine-answer"):
    """Answer to `CallEngine` and `Shutdown`."""

    text: str = ""


FrontReply: TypeAlias = Facts | WorkerReplies | Generations | EngineAnswer | Failure

_T = TypeVar("_T")


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | bytearray | memoryview, expected: type[_T] | object, *, sender: str) -> _T:
    """Decodes `data` as `expected` (a Struct type or a tagged union of them).

    Raises:
        ProtocolError: the bytes are truncated, of another kind, or carry an unknown or missing field.
    """
    try:
        return msgspec.msgpack.decode(data, type=expected)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise errors.ProtocolError(
            f"A message of {len(data)} bytes from {sender} could not be read: {error}.",
            "It is truncated, or comes from another weightlane version or a stranger.",
            "Install the same weightlane on both sides (weightlane doctor shows both versions).",
        ) from error
