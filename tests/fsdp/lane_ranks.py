"""Ranks of real lanes into a reference engine that rank 0 holds; rank 1 leaves in mid-sync.

The only argument is the folder of the engine's model. Every scenario prints its steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fsdp_wrappers import fsdp2
from peft_wrappers import lora
from transformers import AutoModelForCausalLM

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.hookspecs import hookimpl
from weightlane.reference.engine import ReferenceEngine
from weightlane.registry import get_registry
from weightlane.testing import steps
from weightlane.testing.steps import take_step
from weightlane_fsdp.gathering import Gathering

if TYPE_CHECKING:
    from weightlane.events import SyncEvent
    from weightlane.lane import Lane
    from weightlane_fsdp.held import Held

RANK = int(os.environ["RANK"])
FOLDER = sys.argv[1]
WAY_OUT = sys.argv[2]
"""What becomes of rank 1: `killed`, `stopped` (a SIGSTOP), `lost` (its part of a tensor is gone before the
sync) or `breaks` (it cannot read a part in the middle of it)."""

MODE = "merged" if WAY_OUT in ("breaks", "stopped") else "full"
LEARNING_RATE = 2.0 if MODE == "merged" else 0.2  # few of the weights learn

BOUNDS = replace(DEFAULT_BOUNDS, connect=60.0, start=30.0, finish=30.0, bucket=30.0, lost_after=4.0)


class LeavesInMidSync:
    """Rank 1, after its second bucket of the sync that is armed."""

    def __init__(self) -> None:
        self.armed = threading.Event()
        self._buckets = 0

    @hookimpl
    def weightlane_sync_event(self, event: SyncEvent) -> None:
        if event.kind != "bucket-moved" or not self.armed.is_set():
            return
        self._buckets += 1
        time.sleep(0.05)  # so that the other rank is in a collective by then
        if self._buckets == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL if WAY_OUT == "killed" else signal.SIGSTOP)


def open_lane(model: Any, engine: ReferenceEngine | None, **options: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("fsdp", model=model, **options),
        rollout=[wl.rollout("reference", engine=engine)] if RANK == 0 else None,
        bounds=BOUNDS,
        mode=MODE,
        bucket_bytes=16 << 10,
    )


def train(model: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    tokens = torch.arange(8).view(1, 8) + RANK
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def largest_difference(model: Any, engine: ReferenceEngine | None) -> float:
    """Between the engine's log-probs and the trainer's own."""
    tokens = torch.arange(3, 15).view(1, 12)
    with torch.no_grad():
        mine = model(input_ids=tokens).logits.log_softmax(-1)
        if engine is None:
            return 0.0
        return float((engine.model(input_ids=tokens).logits.log_softmax(-1) - mine).abs().max())


def break_at_part(number: int) -> None:
    """Reading a part fails, as it does when a GPU has no memory left for it."""
    read = Gathering._part
    parts: list[str] = []

    def fails(self: Gathering, held: Held) -> torch.Tensor:
        parts.append(held.source.key)
        if len(parts) == number:
            raise RuntimeError(f"no memory for {held.source.key}")
        return read(self, held)

    Gathering._part = fails  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model = fsdp2(lora(whole) if MODE == "merged" else whole)
    engine = ReferenceEngine(FOLDER) if RANK == 0 else None
    leaves = LeavesInMidSync()
    get_registry().register(leaves, name="leaves")
    lane = open_lane(model, engine)
    for version in (1, 2):
        train(model)
        before = largest_difference(model, engine)
        take_step(f"sync {version}", RANK, lambda version=version: lane.sync(version=version))
        after = largest_difference(model, engine)
        steps.tell(f"differences {version}", RANK, {"differences": [f"{before:.3g}", f"{after:.3g}"]})
    if RANK == 1 and WAY_OUT == "lost":
        parameters = dict(model.named_parameters())
        parameters["model.layers.1.mlp.up_proj.weight"]._local_tensor.resize_(0)
    if RANK == 1 and WAY_OUT == "breaks":
        break_at_part(20)
    if WAY_OUT in ("killed", "stopped"):
        leaves.armed.set()
    take_step("left", RANK, lambda: lane.sync(version=3))
    take_step("after", RANK, lambda: lane.sync(version=4))
    os._exit(0)  # the default group has lost a rank, and waits for it at an orderly end


if __name__ == "__main__":
    main()
