"""What two trainer ranks run: mode adapter to an engine of rank 0's own and to one behind a front.

Each rank holds the same wrapped model and trains it alike. Rank 0 asks both engines after each sync; what it
finds is printed as facts (see `weightlane.testing.steps`).
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from adapter_models import apart, engine_says, moved, train_step, wrapped

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.lane import Lane
from weightlane.reference.engine import ReferenceEngine
from weightlane.testing.steps import take_step, tell
from weightlane.transports.shm import ShmSink

RANK = int(os.environ["RANK"])
MODEL = os.environ["ADAPTER_TEST_MODEL"]
URL = os.environ["ADAPTER_TEST_URL"]
BOUNDS = replace(DEFAULT_BOUNDS, lost_after=8.0, connect=60.0, start=30.0, finish=30.0, bucket=30.0)


def open_lane(trainer: Any, engine: ReferenceEngine | None, transport: Any) -> Lane:
    here = [wl.rollout("reference", engine=engine)] if engine else []
    there = [] if transport == "inprocess" else [wl.rollout("reference", url=URL)]
    return wl.connect(
        trainer=trainer,
        rollout=[*here, *there],
        mode="adapter",
        transport=transport,
        bucket_bytes=4096,
        bounds=BOUNDS,
    )


def sync_many(name: str, lane: Lane, policy: Any, count: int) -> None:
    """Syncs; tells the least that a step moved the trainer and the most that an engine was apart from it."""
    least, most, versions, verified = 1e9, 0.0, [], ""
    for version in range(1, count + 1):
        if RANK == 0:
            least = min(least, moved(policy, seed=version))
        else:
            train_step(policy, seed=version)
        report = lane.sync(version)
        ref = lane.adapter_ref()
        for replica in range(len(lane.replicas)):
            said = engine_says(lane, replica, adapter=ref)
            most = max(most, apart(policy, said))
            versions += [item.weight_version for item in said]
            verified = report.replicas[replica].verified
    facts: dict[str, list[str | int | None]] = {
        "moved": [str(least)],
        "apart": [str(most)],
        "versions": [*versions],
        "ref": [lane.adapter_ref().name],
        "verified": [verified],
        "peers": [peer for replica in lane.plan().replicas for peer in replica.peers],
    }
    tell(name, RANK, facts)


def fail_on_rank_1(lane: Lane, policy: Any) -> None:
    """Rank 1 breaks off after two buckets; both engines must answer as if nothing had been sent."""
    before = [engine_says(lane, replica) for replica in range(len(lane.replicas))]
    whole = ShmSink.put

    def put(self: Any, layout: Any, tensors: Any) -> None:
        if RANK == 1 and layout.index == 2:
            raise OSError("the cable is out")
        whole(self, layout, tensors)

    ShmSink.put = put  # type: ignore[method-assign]
    change = moved(policy, seed=99)
    take_step("broken sync", RANK, lambda: lane.sync(50))
    ShmSink.put = whole  # type: ignore[method-assign]
    after = [engine_says(lane, replica) for replica in range(len(lane.replicas))]
    tell("after the broken sync", RANK, {"same": [int(after == before)], "moved": [str(change)]})
    take_step("next sync", RANK, lambda: lane.sync(51))
    most = max(
        (apart(policy, engine_says(lane, replica)) for replica in range(len(lane.replicas))), default=0.0
    )
    tell("after the next sync", RANK, {"apart": [str(most)], "ref": [lane.adapter_ref().name]})


def base_to_one(lane: Lane, engine: ReferenceEngine | None, policy: Any) -> None:
    """Rank 0's own engine was changed by other hands before the lane was opened; the other one was not."""
    report = lane.sync(100)
    base = report.phases[0]
    facts: dict[str, list[str | int | None]] = {
        "phases": [phase.phase.value for phase in report.phases],
        "to": [*base.replicas],
        "bytes": [base.nbytes, *(nbytes for nbytes in (report.phases[-1].nbytes,))],
        "why": [*base.why],
    }
    if engine is not None:
        held = engine.model.state_dict()
        names = {
            name.replace(".base_layer", "").removeprefix("base_model.model."): tensor
            for name, tensor in policy.state_dict().items()
            if ".lora_" not in name
        }
        facts["equal"] = [int(all(torch.equal(held[name], tensor) for name, tensor in names.items()))]
        facts["apart"] = [str(max(apart(policy, engine_says(lane, replica)) for replica in (0, 1)))]
    facts["again"] = [phase.phase.value for phase in lane.sync(101).phases]
    tell("base to one", RANK, facts)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    policy = wrapped(MODEL)
    engine = ReferenceEngine(MODEL) if RANK == 0 else None
    trainer = wl.trainer("torch", model=policy)
    with open_lane(trainer, engine, "shm") as lane:
        sync_many("shm", lane, policy, 10)
        fail_on_rank_1(lane, policy)
    for transport in ("inline", "inprocess"):
        with open_lane(trainer, engine, transport) as lane:
            sync_many(transport, lane, policy, 5)
    part = wl.trainer("torch", model=policy if RANK == 0 else None, placement="partitioned")
    if engine is not None:
        with torch.no_grad():
            engine.model.model.layers[1].mlp.up_proj.weight[3, 4] += 1.0
    with open_lane(part, engine, "shm") as lane:
        base_to_one(lane, engine, policy)
        sync_many("partitioned", lane, policy, 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
