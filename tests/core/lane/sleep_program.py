"""What two trainer ranks run with two engines whose memory the lane manages; rank 1 is the slow one.

Times are of one clock for all processes of a machine, in nanoseconds.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_trainer import FakeLoadingTrainer
from msgspec.structs import replace as replace_struct
from safetensors.torch import load_file

import weightlane as wl
from weightlane import sync_run
from weightlane.bounds import DEFAULT_BOUNDS, Bounds
from weightlane.contexts import BuildRequestsContext
from weightlane.events import SyncEvent
from weightlane.front import endpoint as front_endpoint
from weightlane.front.client import FrontEndpoint
from weightlane.hookspecs import hookimpl
from weightlane.lane import Lane
from weightlane.program import EngineCall, Lifecycle
from weightlane.reference import plugin
from weightlane.registry import get_registry
from weightlane.replica_session import ReplicaSession
from weightlane.residency import ReplicaResidency
from weightlane.testing import steps
from weightlane.testing.steps import take_step
from weightlane.waiting import wait_until

RANK = int(os.environ["RANK"])
MODEL = Path(os.environ["LANE_TEST_MODEL"])
URLS = os.environ["LANE_TEST_URLS"].split(",")
SECOND_ENGINE = int(os.environ["LANE_TEST_SECOND_ENGINE"])
BOUNDS = replace(
    DEFAULT_BOUNDS, lost_after=4.0, connect=60.0, start=30.0, finish=30.0, bucket=30.0, collective=8.0
)
SLOW_SECONDS = 0.5 * RANK


class Times:
    """When each kind of thing was done on this rank since the last `tell`."""

    def __init__(self) -> None:
        self.done: dict[str, list[str | int | None]] = {}

    def note(self, what: str) -> None:
        self.done.setdefault(what, []).append(time.monotonic_ns())

    def tell(self, name: str) -> None:
        steps.tell(name, RANK, self.done)
        self.done = {}


class TimedNotes(list[str]):
    """What the fake trainer's streams note, each taking as long as this rank is slow."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self._times = times

    def append(self, what: str) -> None:
        self._times.note(f"{what} begins")
        time.sleep(SLOW_SECONDS)
        self._times.note(f"{what} ends")


class BucketTimes:
    def __init__(self, times: Times) -> None:
        self._times = times

    @hookimpl
    def weightlane_sync_event(self, event: SyncEvent) -> None:
        if event.kind == "bucket-moved":
            self._times.note("bucket")


class CallSeconds:
    """How long an engine call of the reference plugin may take, as the lane's plan is made."""

    def __init__(self) -> None:
        self.seconds = 60.0

    def apply(self) -> None:
        healthy: Callable[[Any], Lifecycle] = plugin.weightlane_plan_lifecycle

        @hookimpl
        def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
            lifecycle = healthy(context)
            memory = tuple(
                replace_struct(
                    item,
                    release=replace_struct(item.release, timeout_seconds=self.seconds),
                    resume=replace_struct(item.resume, timeout_seconds=self.seconds),
                )
                for item in lifecycle.memory
            )
            return replace_struct(lifecycle, memory=memory)

        plugin.weightlane_plan_lifecycle = weightlane_plan_lifecycle


def open_lane(weights: dict[str, torch.Tensor], bounds: Bounds) -> Lane:
    return wl.connect(
        trainer=wl.trainer("loading", model=weights),
        rollout=[wl.rollout("reference", url=url) for url in URLS] if RANK == 0 else None,
        bounds=bounds,
        bucket_bytes=64 << 10,
        release=("weights", "kv_cache"),
    )


def released(name: str, lane: Lane) -> None:
    if RANK == 0:
        answers = lane.residency()
        steps.tell(name, RANK, {str(item.replica): list(item.workers[0].released) for item in answers})


def somebody_else_calls(route: str) -> None:
    FrontEndpoint(URLS[1], 30.0).call(EngineCall(route))


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """On rank 0: does it after the second engine has said what it holds, before the lane acts on that."""
    adopt = ReplicaSession.adopt

    def interfered(session: ReplicaSession, residency: ReplicaResidency) -> None:
        adopt(session, residency)
        if session.number == 1:
            action()

    ReplicaSession.adopt = interfered  # type: ignore[method-assign]
    yield
    ReplicaSession.adopt = adopt  # type: ignore[method-assign]


def generate(name: str, lane: Lane) -> None:
    for endpoint in lane.replicas:
        made = take_step(name, RANK, lambda endpoint=endpoint: endpoint.generate([[1, 2, 3]], max_tokens=1))
        if made:
            steps.tell(f"{name}: version", RANK, {"version": [made[0].weight_version]})


@contextmanager
def in_no_order(stream: Any, lifecycle: object, agree: object) -> Iterator[None]:
    """`loaded` without its rule: nobody waits for another rank, nor for one's own offload."""
    del lifecycle, agree
    stream.onload()
    yield
    thread = threading.Thread(target=stream.offload)
    thread.start()
    offloads.append(thread)


offloads: list[threading.Thread] = []


def schedule(lane: Lane, times: Times) -> None:
    """The order of both sides over two ranks, as it is planned and with the rule undone."""
    take_step("as planned", RANK, lambda: lane.sync(version=1))
    times.tell("times as planned")
    planned = sync_run.loaded
    sync_run.loaded = in_no_order  # type: ignore[assignment]
    take_step("in no order", RANK, lambda: lane.sync(version=2))
    sync_run.loaded = planned
    for thread in offloads:
        thread.join(10.0)
    times.tell("times in no order")


def sleeping(lane: Lane) -> None:
    """Sleep and sync; then a sleep and a wake that fail on the second engine; then a sync that heals."""
    take_step("sleep", RANK, lane.sleep)
    released("asleep", lane)
    generate("generate asleep", lane)
    take_step("sync wakes", RANK, lambda: lane.sync(version=3))
    released("after the sync", lane)
    generate("generate awake", lane)

    with meanwhile(lambda: somebody_else_calls("release_kv_cache")):
        take_step("failing sleep", RANK, lane.sleep)
    released("after the failing sleep", lane)
    with meanwhile(lambda: somebody_else_calls("resume_kv_cache")):
        take_step("failing wake", RANK, lane.wake)
    released("after the failing wake", lane)
    take_step("healed", RANK, lambda: lane.sync(version=4))
    generate("generate healed", lane)


def hanging(calls: CallSeconds, weights: dict[str, torch.Tensor]) -> None:
    """The second engine hangs in its release: longer than `start` and `finish`, shorter than its call may."""
    calls.seconds = 8.0
    front_endpoint.ANSWER_SECONDS = 1.0
    with open_lane(weights, replace(BOUNDS, start=3.0, finish=0.5)) as lane:
        with meanwhile(lambda: os.kill(SECOND_ENGINE, signal.SIGSTOP)):
            take_step("hanging sleep", RANK, lane.sleep)
        if RANK == 0:
            os.kill(SECOND_ENGINE, signal.SIGCONT)
            # What it was asked before is what it does first when it goes on.
            assert wait_until(lambda: bool(lane.residency()[1].workers[0].released), seconds=30.0)


def main() -> None:
    times, calls = Times(), CallSeconds()
    calls.apply()
    registry = get_registry()
    registry.register(FakeLoadingTrainer(TimedNotes(times)), name="loading")
    registry.register(BucketTimes(times), name="bucket-times")
    call = FrontEndpoint.call

    def timed(self: FrontEndpoint, what: EngineCall, *, version: int | None = None) -> str:
        answer = call(self, what, version=version)
        times.note(what.route)
        return answer

    FrontEndpoint.call = timed  # type: ignore[method-assign]
    weights = load_file(MODEL / "model.safetensors")
    with open_lane(weights, BOUNDS) as lane:
        schedule(lane, times)
        sleeping(lane)
        hanging(calls, weights)
        take_step("at the end", RANK, lambda: lane.sync(version=5))
        generate("generate at the end", lane)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
