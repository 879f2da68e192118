"""What two trainer ranks run to sync over a folder: `LANE_TEST_FOLDER`, on a real reference engine."""

import os
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.events import SyncEvent
from weightlane.hookspecs import hookimpl
from weightlane.lane import Lane
from weightlane.registry import get_registry
from weightlane.testing import steps
from weightlane.testing.steps import take_step

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
MODEL = Path(os.environ["LANE_TEST_MODEL"])
URL = os.environ["LANE_TEST_URL"]
FOLDER = os.environ["LANE_TEST_FOLDER"]
BOUNDS = replace(
    DEFAULT_BOUNDS, lost_after=4.0, connect=60.0, start=30.0, finish=30.0, bucket=30.0, collective=8.0
)
Transport = Literal["shm", "inline", "disk"]


class Spoiler:
    """Alters one byte of the second file as soon as it is written, once."""

    armed = False

    @hookimpl
    def weightlane_sync_event(self, event: SyncEvent) -> None:
        files = sorted(Path(FOLDER).glob(f"weightlane-{event.lane}-*/sync-{event.sync}-*/model-00002-of-*"))
        if event.kind == "bucket-moved" and self.armed and files:
            self.armed = False
            data = bytearray(files[0].read_bytes())
            data[-1] ^= 1
            files[0].write_bytes(data)


def open_lane(
    tensors: Mapping[str, object],
    transport: Transport,
    placement: Literal["replicated", "partitioned"],
    folder: str = "",
) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=tensors, placement=placement),
        rollout=[wl.rollout("reference", url=URL)] if RANK == 0 else None,
        bounds=BOUNDS,
        bucket_bytes=64 << 10,
        transport=transport,
        folder=folder,
    )


def tell(name: str, **facts: list[str | int | None]) -> None:
    if RANK == 0:
        steps.tell(name, RANK, facts)


def versions_in_folder() -> list[str | int | None]:
    return sorted(path.name for path in Path(FOLDER).glob("weightlane-*/*"))


def generate_with(lane: Lane, name: str) -> None:
    if RANK == 0:
        made = take_step(name, RANK, lambda: lane.replicas[0].generate([[1, 2, 3]], max_tokens=2))
        tell(f"{name}: version", versions=[item.weight_version for item in made or ()])


def compare_transports() -> None:
    """The same weights over every transport and placement: one manifest, one digest."""
    good = load_file(MODEL / "model.safetensors")
    half = {name: tensor for number, (name, tensor) in enumerate(good.items()) if number % WORLD == RANK}
    version = 0
    for placement, tensors in (("replicated", good), ("partitioned", half)):
        for transport in ("shm", "inline", "disk"):
            version += 1
            with open_lane(tensors, transport, placement) as lane:  # type: ignore[arg-type]
                report = lane.sync(version=version)
                tell(
                    f"{placement} over {transport}",
                    digest=[report.digest],
                    manifest=[lane.plan().manifest.digest()],
                    verified=[replica.verified for replica in report.replicas],
                    plan=[line.strip() for line in str(lane.plan()).splitlines()],
                )


def fail_and_resume() -> None:
    """A disk that is too small, a file altered behind the trainer's back, and what comes after each."""
    good = load_file(MODEL / "model.safetensors")
    spoiler = Spoiler()
    get_registry().register(spoiler, name="spoiler")
    with open_lane(good, "disk", "replicated", FOLDER) as lane:
        take_step("first", RANK, lambda: lane.sync(version=20))
        tell("after the first", folders=versions_in_folder())

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        take_step("too small", RANK, lambda: lane.sync(version=21))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        tell("after too small", folders=versions_in_folder())
        generate_with(lane, "generate after too small")

        for tensor in good.values():
            tensor.add_(torch.full_like(tensor, 0.01))
        spoiler.armed = RANK == 0
        take_step("altered", RANK, lambda: lane.sync(version=22))
        tell("after altered", folders=versions_in_folder())
        generate_with(lane, "generate after altered")

        take_step("healed", RANK, lambda: lane.sync(version=23))
        generate_with(lane, "generate after healed")
    tell("after close", folders=versions_in_folder())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare_transports()
    fail_and_resume()
    take_step(
        "bad folder",
        RANK,
        lambda: open_lane(load_file(MODEL / "model.safetensors"), "disk", "replicated", f"{FOLDER}/no/such"),
    )
    take_step(
        "folders differ",
        RANK,
        lambda: open_lane(load_file(MODEL / "model.safetensors"), "disk", "replicated", f"{FOLDER}{RANK}"),
    )
    dist.destroy_process_group()
