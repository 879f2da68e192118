"""What the trainer ranks of these tests run; its only argument names a scenario (a function below).

Weights are a mapping read from a safetensors file, so that a rank needs torch alone. Every scenario prints
its steps (see `weightlane.testing.steps`).
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace as replace_struct
from safetensors.torch import load_file, save_file

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.contexts import BuildRequestsContext
from weightlane.events import SyncEvent
from weightlane.front.client import FrontEndpoint
from weightlane.hookspecs import hookimpl
from weightlane.lane import Lane
from weightlane.program import EngineCall, Lifecycle
from weightlane.registry import get_registry
from weightlane.replica_session import ReplicaSession
from weightlane.ring_file import shared_memory_folder
from weightlane.testing import steps
from weightlane.testing.steps import take_step

T = TypeVar("T")
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
MODEL = Path(os.environ["LANE_TEST_MODEL"])
URLS = os.environ["LANE_TEST_URLS"].split(",")
BOUNDS = replace(
    DEFAULT_BOUNDS, lost_after=4.0, connect=60.0, start=30.0, finish=30.0, bucket=30.0, collective=8.0
)


class SlowBuckets:
    """Makes a sync last seconds, and says when it is under way."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.moved = threading.Event()

    @hookimpl
    def weightlane_sync_event(self, event: SyncEvent) -> None:
        if event.kind == "bucket-moved":
            print("MOVED A BUCKET", flush=True)
            if self.seconds:
                self.moved.set()
            time.sleep(self.seconds)


def weights() -> dict[str, torch.Tensor]:
    return load_file(MODEL / "model.safetensors")


def changed(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)


def open_lane(
    tensors: Mapping[str, object],
    *,
    placement: Literal["replicated", "partitioned"] = "replicated",
    urls: Sequence[str] | None = None,
) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=tensors, placement=placement),
        rollout=[wl.rollout("reference", url=url) for url in urls or URLS[:1]] if RANK == 0 else None,
        bounds=BOUNDS,
        bucket_bytes=64 << 10,
    )


def step(name: str, action: Callable[[], T]) -> T | None:
    return take_step(name, RANK, action)


def tell(name: str, **facts: list[str | int | None]) -> None:
    if RANK == 0:
        steps.tell(name, RANK, facts)


def held_versions() -> list[str | int | None]:
    """What the engine's workers hold, on rank 0; None for weights that no lane ever sent."""
    if RANK != 0:
        return []
    return [worker.held_version for worker in FrontEndpoint(URLS[0], 60.0).describe_workers("reference")]


def halt(word: str) -> None:
    """Rank 0 says that it is here and waits until the test has made a file of that name."""
    if RANK == 0:
        print(word, flush=True)
        file = Path(os.environ["LANE_TEST_GO"]) / word
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def keep_weights(tensors: dict[str, torch.Tensor], name: str) -> None:
    if RANK == 0:
        save_file(tensors, Path(os.environ["LANE_TEST_GO"]) / f"{name}.safetensors")


def tell_state(name: str, lane: Lane) -> None:
    state = lane.state
    steps.tell(
        name,
        RANK,
        {
            "phase": [state.phase],
            "published": [state.published_version],
            "held": [replica.held_version for replica in state.replicas],
            "servable": [None if item.servable is None else int(item.servable) for item in state.replicas],
            "errors": [replica.last_error for replica in state.replicas],
            "printed": [str(state)],
        },
    )


# -- scenarios ----------------------------------------------------------------------------------------------


def bad_input() -> None:
    """Plans that must fail alike on every rank, before the receiver is touched; then one that works."""
    good = weights()
    first = next(iter(good))
    tell("untouched", versions=held_versions())

    on_one_rank = {**good, **({"model.extra.weight": torch.zeros(3)} if RANK == 1 else {})}
    step("tensor on one rank only", lambda: open_lane(on_one_rank))

    several = {
        name: tensor for name, tensor in good.items() if not name.endswith("layers.1.mlp.up_proj.weight")
    }
    several["model.layers.1.mlp.upp_proj.weight"] = good["model.layers.1.mlp.up_proj.weight"]
    several["model.norm.weight"] = torch.zeros(3)
    several["lm_head.weight"] = good["lm_head.weight"].to(torch.int32)
    step("several at once", lambda: open_lane(several))

    differs = {**good, first: good[first].to(torch.float16) if RANK == 1 else good[first]}
    step("dtype differs between ranks", lambda: open_lane(differs))

    not_a_tensor = {**good, first: "text"} if RANK == 1 else good
    step("not a tensor on rank 1", lambda: open_lane(not_a_tensor))

    step(
        "no such engine",
        lambda: wl.connect(
            trainer=wl.trainer("torch", model=good),
            rollout=[wl.rollout("refference", url=URLS[0])],
            bounds=BOUNDS,
        ),
    )
    step(
        "mode nobody has",
        lambda: wl.connect(
            trainer=wl.trainer("torch", model=good),
            rollout=[wl.rollout("reference", url=URLS[0])],
            mode="adapter",
            bounds=BOUNDS,
        ),
    )

    # Rank 1 selected no rollout, so that its lock holds less than rank 0's.
    wl.write_lock(MODEL.parent / f"rank-{RANK}.lock")
    step(
        "locks that differ",
        lambda: wl.connect(
            trainer=wl.trainer("torch", model=good),
            rollout=[wl.rollout("reference", url=URLS[0])],
            bounds=BOUNDS,
            locked=MODEL.parent / f"rank-{RANK}.lock",
        ),
    )
    step(
        "a lock that is not there",
        lambda: wl.connect(
            trainer=wl.trainer("torch", model=good),
            rollout=[wl.rollout("reference", url=URLS[0])],
            bounds=BOUNDS,
            locked=MODEL.parent / f"rank-{2 * RANK}.lock",
        ),
    )

    changed(good, seed=1)
    lane = open_lane(good)
    tell("before", versions=held_versions())
    step("different versions", lambda: lane.sync(version=10 + RANK))
    step("good", lambda: lane.sync(version=2))
    lane.close()


def drift() -> None:
    """A model that changes shape after connect, a failed sync's fence, and healing by the next sync."""
    good = weights()
    lane = open_lane(good)
    step("first", lambda: lane.sync(version=1))
    last = list(good)[-1]
    whole = good[last]
    good[last] = whole[:-1].clone()
    step("changed shape", lambda: lane.sync(version=2))
    good[last] = whole
    if RANK == 0:
        step("generate after refused export", lambda: lane.replicas[0].generate([[1, 2, 3]], max_tokens=2))
    step("commit without stage", lane.commit)
    step("healed", lambda: lane.sync(version=3))
    if RANK == 0:
        generated = lane.replicas[0].generate([[1, 2, 3]], max_tokens=2)
        tell("versions", versions=[item.weight_version for item in generated])
    lane.close()
    step("closed lane", lambda: lane.sync(version=4))


def diverged() -> None:
    """Two replicas fed by two ranks whose copies differ in one element."""
    good = weights()
    lane = open_lane(good, urls=URLS)
    step("equal", lambda: lane.sync(version=1))
    if RANK == 1:
        next(iter(good.values())).view(-1)[0] += 1.0
    step("diverged", lambda: lane.sync(version=2))
    if RANK == 0:
        step("generate while fenced", lambda: lane.replicas[1].generate([[1, 2, 3]], max_tokens=2))
        next(iter(good.values())).view(-1)[0] += 1.0
    step("equal again", lambda: lane.sync(version=3))
    lane.close()


def slow_sync() -> None:
    """A sync that lasts seconds, for whoever wants to kill something in the middle of it."""
    placement = os.environ.get("LANE_TEST_PLACEMENT", "replicated")
    good = weights()
    mine = good
    if placement == "partitioned":
        mine = {name: tensor for number, (name, tensor) in enumerate(good.items()) if number % WORLD == RANK}
    get_registry().register(SlowBuckets(0.4), name="slow")
    lane = open_lane(mine, placement=placement)
    step("slow", lambda: lane.sync(version=5))
    step("after", lambda: lane.sync(version=6))


def rejoin() -> None:
    """Replica 1 is killed, comes back as another model, then as itself, and is killed in mid-sync."""
    good = weights()
    slow = SlowBuckets(0.0)
    lane = open_lane(good, urls=URLS)
    first = lane.replicas[:1]
    step("both", lambda: lane.sync(version=1))
    halt("BOTH")
    changed(good, seed=2)
    step("while it is dead", lambda: lane.sync(version=2))
    if RANK == 0:
        generated = lane.replicas[0].generate([[1, 2, 3]], max_tokens=2)
        tell("served meanwhile", versions=[item.weight_version for item in generated])
    tell_state("state while it is dead", lane)
    halt("DEAD")
    step("another model", lambda: lane.sync(version=3))
    halt("REFUSED")
    changed(good, seed=3)
    report = step("back", lambda: lane.sync(version=4))
    tell(
        "rejoined",
        replicas=list(report.rejoined) if report else [],
        peers=list(lane.plan().replicas[1].peers),
    )
    tell("first kept", same=[int(lane.replicas[:1] == first)])
    keep_weights(good, "back")
    halt("BACK")
    get_registry().register(slow, name="slow")
    slow.seconds = 0.4
    changed(good, seed=4)
    step("killed in the middle", lambda: lane.sync(version=5))
    tell_state("state after the kill", lane)
    slow.seconds = 0.0
    halt("KILLED")
    step("back again", lambda: lane.sync(version=6))
    keep_weights(good, "back again")
    tell_state("state at the end", lane)
    lane.close()


def async_loop() -> None:
    """Rank 0 generates and trains in an event loop, other ranks sync plainly.

    One sync is cancelled while it runs, and one while it is queued.
    """
    good = weights()
    slow = SlowBuckets(0.0)
    get_registry().register(slow, name="slow")
    lane = open_lane(good)

    async def controller() -> None:
        versions: list[int] = []

        async def sample_until(version: int) -> None:
            while versions[-1:] != [version]:
                made = await asyncio.to_thread(lambda: lane.replicas[0].generate([[1, 2]], max_tokens=1))
                versions.append(made[0].weight_version or 0)

        await lane.aio.sync(version=1)
        sampling = asyncio.create_task(sample_until(3))
        for version in (2, 3):
            changed(good, seed=version)
            await lane.aio.stage(version=version)
            await lane.aio.commit()
        await sampling
        tell("sampled", versions=sorted(set(versions)))
        slow.seconds = 0.2
        sync = asyncio.create_task(lane.aio.sync(version=4))
        await asyncio.to_thread(slow.moved.wait, 30.0)
        sync.cancel()
        await asyncio.wait([sync])
        slow.seconds = 0.0
        tell("cancelled", cancelled=[int(sync.cancelled())], phase=[lane.state.phase])
        slow.moved.clear()
        slow.seconds = 0.1
        runs = asyncio.create_task(lane.aio.sync(version=5))
        await asyncio.to_thread(slow.moved.wait, 30.0)
        slow.seconds = 0.0
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lane.aio.sync(version=6), timeout=0.05)
        tell("timed out", syncs=[lane.state.syncs], phase=[lane.state.phase])
        await runs
        await lane.aio.sync(version=7)

    if RANK == 0:
        asyncio.run(controller())
    else:
        for version in range(1, 8):
            if version in (2, 3):
                changed(good, seed=version)
            step(f"plain {version}", lambda version=version: lane.sync(version=version))
    tell_state("end", lane)
    lane.close()


def half_published() -> None:
    """Two replicas; the second dies while the first is being published, when told so by a file."""
    healthy = ReplicaSession.publish

    def publish(session: ReplicaSession, sync: int, version: int) -> None:
        if session.number == 1:
            print("PUBLISHED THE FIRST", flush=True)
            go = Path(os.environ["LANE_TEST_GO"])
            deadline = time.monotonic() + 60
            while not go.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        healthy(session, sync, version)

    ReplicaSession.publish = publish  # type: ignore[method-assign]
    lane = open_lane(weights(), urls=URLS)
    step("stage", lambda: lane.stage(version=1))
    step("commit", lane.commit)
    if RANK == 0:
        generated = step("first replica serves", lambda: lane.replicas[0].generate([[1, 2, 3]], max_tokens=1))
        tell("served", versions=[item.weight_version for item in generated or ()])
    tell("published", version=[lane.published_version])


def failed_settle() -> None:
    """An engine call that belongs after the last bucket, such as a cache flush, fails."""
    from weightlane.reference import plugin

    healthy = plugin.weightlane_plan_lifecycle

    @hookimpl
    def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
        return replace_struct(healthy(context), settle=(EngineCall("flush_cache_that_fails"),))

    plugin.weightlane_plan_lifecycle = weightlane_plan_lifecycle
    lane = open_lane(weights())
    step("settle", lambda: lane.sync(version=1))
    tell("published", version=[lane.published_version])
    if RANK == 0:
        step("generate", lambda: lane.replicas[0].generate([[1, 2, 3]], max_tokens=1))


def no_op_and_many() -> None:
    """Unchanged weights raise the stale alarm; many syncs in a row leave nothing behind."""
    good = weights()
    lane = open_lane(good)
    lane.sync(version=1)
    tell("unchanged", since=[lane.sync(version=2).unchanged_since])
    changed(good, seed=3)
    tell("changed", since=[lane.sync(version=3).unchanged_since])
    for version in range(4, 24):
        lane.sync(version=version)
    step("many", lambda: lane.sync(version=24))
    lane.close()
    tell(
        "rings left",
        rings=[path.name for path in shared_memory_folder().glob(f"weightlane-{lane.plan().lane}*")],
    )


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    {
        "bad_input": bad_input,
        "drift": drift,
        "diverged": diverged,
        "slow_sync": slow_sync,
        "rejoin": rejoin,
        "async_loop": async_loop,
        "half_published": half_published,
        "failed_settle": failed_settle,
        "no_op_and_many": no_op_and_many,
    }[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
