"""The program of one sync: steps made at plan time, replayed at every sync.

Each known before the first byte moves: `pause` holds generation back, `memory` is let go and taken back,
`move` carries the buckets, `settle` runs after the last bucket (a cache flush), `publish` makes the new
version visible once every replica has verified, `resume` lets generation go on. A failure runs `resume` only
where the receiver is known to be intact. The order, with the trainer's share, is in `weightlane.schedule`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weightlane.types import MemoryTag, RequestPolicy


class EngineCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the engine: a route (HTTP path or method of a front) and its fields as a JSON object.

    `body` is JSON with exactly the fields that the engine's request type lists, made once. `version_field`
    names the field that receives the version at each sync, if any.
    """

    route: str
    body: str = "{}"
    version_field: str = ""
    timeout_seconds: float = 60.0


class MemoryCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory of one tag is let go and taken back: always both, so that the two are symmetric.

    `contents` says whether `resume` brings back what was in it (from a copy on the host) or only the memory.
    """

    tag: MemoryTag
    release: EngineCall
    resume: EngineCall
    contents: Literal["kept", "lost"] = "lost"


class AgentMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="agent"):
    """Our agent receives: by ring (`shm`, `cuda_ipc`), by value (`inline`), by reference or from a folder."""

    transport: Literal["shm", "cuda_ipc", "inline", "inprocess", "disk"]


class AnnouncedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of the engine's own, over which the controller (rank 0) broadcasts to `workers` other ranks."""

    backend: Literal["gloo", "nccl"]
    workers: int


class RequestMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="request"):
    """Only the engine's own requests exist: one request a bucket.

    `payload_field` receives `copies` times the bucket's payload. `body` is the JSON of every bucket but the
    last, `last_body` that of the last (a cache flush belongs to it alone). With a `group` the request only
    announces a bucket (`payload_field` is empty), which is then broadcast over that group.
    """

    route: str
    payload_field: str
    copies: int
    body: str
    last_body: str
    timeout_seconds: float = 120.0
    transport: Literal["inline", "collective"] = "inline"
    group: AnnouncedGroup | None = None


class AdapterMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adapter-request"):
    """Only the engine's own requests exist, and an adapter goes whole in one of them, after the last bucket.

    The endpoint is a `weightlane.adapter_requests.AdapterEndpoint`. `payload_field` receives a list of
    `copies` payloads, or, where `copies` is 0, one payload that is no list. `body` is the JSON of what is the
    same in each sync; the endpoint adds the adapter's name and configuration.
    """

    route: str
    payload_field: str
    copies: int
    body: str
    timeout_seconds: float = 120.0
    transport: Literal["inline"] = "inline"


Move: TypeAlias = AgentMove | RequestMove | AdapterMove


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one sync towards one replica; `notes` is shown in the plan (advisory fences, casts)."""

    move: Move
    pause: tuple[EngineCall, ...] = ()
    settle: tuple[EngineCall, ...] = ()
    publish: tuple[EngineCall, ...] = ()
    resume: tuple[EngineCall, ...] = ()
    notes: tuple[str, ...] = ()
    memory: tuple[MemoryCalls, ...] = ()
    requests: RequestPolicy | None = None


class Lifecycle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `weightlane_plan_lifecycle` of a rollout backend gives: calls around the move.

    `memory` has an entry for each tag of `context.release`; a tag that is left out is a problem of the plan.
    `requests` is what these calls do with requests that run, None where that is not known; one that differs
    from `context.requests` is a problem. With `pause` calls and an agent it is the engine itself that holds
    requests back, and a front does not wait for them.
    """

    pause: tuple[EngineCall, ...] = ()
    settle: tuple[EngineCall, ...] = ()
    publish: tuple[EngineCall, ...] = ()
    resume: tuple[EngineCall, ...] = ()
    notes: tuple[str, ...] = ()
    memory: tuple[MemoryCalls, ...] = ()
    requests: RequestPolicy | None = None


class TrainerLifecycle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `weightlane_plan_lifecycle` of a trainer backend gives: what its streams do around the move.

    `onload` and `offload` say it in words; "" means that there is nothing to do. Where they are given, the
    backend's export stream has methods of these names (see `weightlane.stream.MovesMemory`).
    """

    onload: str = ""
    offload: str = ""
    notes: tuple[str, ...] = ()


def with_lifecycle(program: Program, lifecycle: Lifecycle) -> Program:
    """The program with the lifecycle's calls outside its own: pause first, resume last."""
    return msgspec.structs.replace(
        program,
        pause=lifecycle.pause + program.pause,
        settle=program.settle + lifecycle.settle,
        publish=program.publish + lifecycle.publish,
        resume=program.resume + lifecycle.resume,
        notes=program.notes + lifecycle.notes,
        memory=program.memory + lifecycle.memory,
        requests=lifecycle.requests,
    )
