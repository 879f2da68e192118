"""`connect`: joins a trainer to rollout engines."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightlane.adapters import SWAP_POLICIES
from weightlane.bounds import DEFAULT_BOUNDS, Bounds
from weightlane.buckets import DEFAULT_BUCKET_BYTES
from weightlane.errors import EngineError, UsageError, near_names
from weightlane.specs import rollout, trainer
from weightlane.types import (
    MEMORY_TAGS,
    READ_BACK_POLICIES,
    REQUEST_POLICIES,
    VERIFY_LEVELS,
    Mode,
    TransportName,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from weightlane.adapters import SwapPolicy
    from weightlane.lane import Lane
    from weightlane.specs import RolloutSpec, TrainerSpec
    from weightlane.types import MemoryTag, MissingPolicy, ReadBackPolicy, RequestPolicy, VerifyLevel

__all__ = ["connect", "rollout", "trainer"]

_lane_numbers = itertools.count(1)


def connect(
    *,
    trainer: TrainerSpec,
    rollout: Sequence[RolloutSpec] | None,
    mode: Mode | Literal["full", "merged", "adapter"] = Mode.FULL,
    verify: VerifyLevel = "digest",
    transport: TransportName
    | Literal["inprocess", "cuda_ipc", "shm", "inline", "collective", "disk"]
    | None = None,
    folder: str = "",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    missing_replicas: MissingPolicy = "fail",
    release: Collection[MemoryTag] = (),
    read_back: ReadBackPolicy = "first",
    swap: SwapPolicy | None = None,
    requests: RequestPolicy | None = None,
    control: str | None = None,
    bounds: Bounds = DEFAULT_BOUNDS,
    locked: str | Path | None = None,
) -> Lane:
    """Joins a trainer to rollout engines. Every trainer rank calls it, with the same arguments but `model`.

    Ranks are those of `torch.distributed` where it is initialised, else there is one. Rank 0 is the
    controller; `rollout` matters there alone. Nothing is sent and no receiver is touched before the plan is
    agreed; a problem on one rank is the same error on all.

    Args:
        trainer: this rank's part of the export.
        rollout: the replicas, on rank 0; None or anything elsewhere.
        mode: what to move.
        verify: `off`, `counts`, or `digest` (counts and an xxh3 over every byte on both sides).
        transport: None chooses: by reference in one process; where every worker shares its GPU with a rank,
            memory of that GPU (`cuda_ipc`); a ring on one host (`shm`); by value otherwise. `disk` is never
            chosen for you, nor is `collective`: rank 0 broadcasts over a group that the engine makes for it.
        folder: for transport `disk`: where rank 0 writes each version as safetensors files, and all engine
            workers read them, so both must see it. The lane makes a private folder of its own below it and
            leaves the published version there. "" takes a temporary folder, removed at `close`.
        bucket_bytes: size of one bucket; a larger tensor travels alone.
        missing_replicas: what a sync does while a replica does not answer. `fail`: it fails before anything
            is written, names the replica, and all others go on serving the version that they had. `skip`: it
            goes on with the others, lists the replica in `SyncReport.missing`, and takes it back with the
            first sync before which it answers again. A replica that is lost in the middle of a sync fails
            that sync either way.
        release: memory that rollout engines let go of while the lane needs room or has them sleep
            (`lane.sleep`): `kv_cache` is released around every sync, `weights` only by `sleep`. Fixed here,
            for the life of the lane, whatever happens later; only what was released is ever resumed.
        read_back: when engine workers compare what they hold after a load with what was sent, through the
            placement table that the plan was made from: the only check that sees an engine repack its weights
            in place. `first`: at the first sync of the lane, and of a replica that came back. `always`: at
            every sync. `never`. It costs the worker two hashes of its weights. Replicas without a table are
            not compared, and refused with `always`.
        swap: in mode adapter, how a new adapter takes the place of the old one. `two_slot` (None means it):
            the old one serves until the new one is published, and each version has a name of its own.
            `paused`: the engine holds one adapter, whose name never changes; generation is held back while it
            is exchanged. An engine that cannot keep the policy is refused. `lane.adapter_ref()` is right
            under both.
        requests: what a sync does with requests that run in an engine. `drain`: it waits until they have
            ended, so that each is answered by one version; longer than `bounds.drain`, and the sync fails.
            `abort`: they end at once, unfinished. `keep`: they stand still while weights are written and go
            on with the new ones, their context computed anew, so that an answer may be of two versions. New
            requests wait under each. With `swap="two_slot"` requests keep the adapter that they name, and
            this says what becomes of those that still run with it at the sync after the next. None takes
            what the engine's backend does by itself, which the plan tells; a policy that it cannot keep is
            refused.
        control: `tcp://host:port` of the control channel, equal on all ranks; None asks the store that
            `torch.distributed` was initialised with.
        bounds: every wait's limit.
        locked: a file that `weightlane lock` wrote; any backend that it does not name is refused. None keeps
            to `WEIGHTLANE_LOCKED`, where that is set.

    Raises:
        LockError: what would be selected is not what the lock names, or the lock cannot be read.
        PlanError: every problem of the plan at once.
        UsageError: `verify`, `read_back`, `swap` or `requests` is no word of theirs, or `swap` means nothing
            here; raised before any other rank is met.
        WeightlaneError: an engine that does not answer, no backend, a lost rank.
    """
    from weightlane.connect_procedure import ConnectProcedure
    from weightlane.control import CONTROLLER
    from weightlane.rendezvous import open_control_channel
    from weightlane.wishes import Wishes

    # What cannot be meant is refused before a channel is open that nobody would close.
    level, tags, moved = _verify_level(verify), _memory_tags(release), Mode(mode)
    carrier = None if transport is None else TransportName(transport)
    compared = _read_back_policy(read_back)
    swapped, running = _swap_policy(swap, moved), _request_policy(requests)
    rank, world_size = _place_among_ranks()
    number = next(_lane_numbers)
    channel = open_control_channel(
        address=control,
        lane=f"lane-{number}",
        rank=rank,
        world_size=world_size,
        seconds=bounds.connect,
        lost_after=bounds.lost_after,
    )
    wishes = Wishes(
        trainer=trainer,
        replicas=tuple(rollout or ()) if rank == CONTROLLER else (),
        mode=moved,
        verify=level,
        transport=carrier,
        bucket_bytes=bucket_bytes,
        missing_replicas=missing_replicas,
        release=tags,
        bounds=bounds,
        folder=folder,
        lane=f"lane-{number}-{secrets.token_hex(3)}",
        locked=None if locked is None else Path(locked),
        read_back=compared,
        swap=swapped,
        requests=running,
    )
    procedure = ConnectProcedure(wishes, channel)
    try:
        return procedure.run()
    except BaseException:
        procedure.undo()
        channel.close()
        raise


def _verify_level(verify: str) -> VerifyLevel:
    for level in VERIFY_LEVELS:
        if verify == level:
            return level
    raise UsageError(
        f"verify={verify!r} is no level of verification.",
        f"It is one of {', '.join(VERIFY_LEVELS)}.",
        f"Use {VERIFY_LEVELS[-1]}, which checks most.",
    )


def _memory_tags(release: Collection[str]) -> tuple[MemoryTag, ...]:
    """The tags in one order, the same on every rank."""
    unknown = sorted(set(release) - set(MEMORY_TAGS))
    if unknown:
        near = ", ".join(near_names(unknown[0], MEMORY_TAGS))
        raise EngineError(
            f"release={sorted(release)!r} names memory that no engine has: {', '.join(unknown)}.",
            f"It can name {', '.join(MEMORY_TAGS)}.",
            f"Use {near}." if near else "",
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in release)


def _read_back_policy(wanted: str) -> ReadBackPolicy:
    for policy in READ_BACK_POLICIES:
        if wanted == policy:
            return policy
    raise UsageError(
        f"read_back={wanted!r} is unknown.",
        f"It is one of {', '.join(READ_BACK_POLICIES)}.",
        "Correct connect(...).",
    )


def _swap_policy(wanted: str | None, mode: Mode) -> SwapPolicy:
    if wanted is not None and mode is not Mode.ADAPTER:
        raise UsageError(
            f"swap={wanted!r} was given with mode {mode.value}.",
            "It says how adapters are swapped, and only mode adapter moves any.",
            "Leave it out, or connect with mode='adapter'.",
        )
    for policy in SWAP_POLICIES:
        if (wanted or SWAP_POLICIES[0]) == policy:
            return policy
    raise UsageError(
        f"swap={wanted!r} is no policy.",
        f"It is one of {', '.join(SWAP_POLICIES)}.",
        f"Use {(near_names(str(wanted), SWAP_POLICIES) or SWAP_POLICIES)[0]}.",
    )


def _request_policy(wanted: str | None) -> RequestPolicy | None:
    for policy in REQUEST_POLICIES:
        if wanted == policy:
            return policy
    if wanted is None:
        return None
    raise UsageError(
        f"requests={wanted!r} is no policy.",
        f"It is one of {', '.join(REQUEST_POLICIES)}.",
        f"Use {(near_names(str(wanted), REQUEST_POLICIES) or REQUEST_POLICIES)[0]}.",
    )


def _place_among_ranks() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
