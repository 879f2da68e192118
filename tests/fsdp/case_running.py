"""Runs a list of cases on this rank, one after the other, and keeps what became of each."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOGETHER_SECONDS = 60.0
"""By how much ranks may end a case apart; much longer than any case takes."""


def run(cases: Mapping[str, Callable[[], None]]) -> None:
    """Every rank starts each case together with the others, also after one that failed on some rank.

    Where a rank does not come to the end of a case that this one has left, what is known so far is kept and
    this rank ends: the other one waits inside of a collective that nobody will join.
    """
    torch.set_num_threads(1)
    device = torch.device(os.environ.get("FSDP_TEST_DEVICE", "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    only = sys.argv[2:]
    told: dict[str, str] = {}
    for name, case in cases.items():
        if only and name not in only:
            continue
        told[name] = f"rank {dist.get_rank()} is still in this case"
        keep(told)
        meet(f"before {name}")
        started = time.monotonic()
        try:
            case()
            told[name] = ""
        except Exception:  # noqa: BLE001 - whatever it is, the test of this case tells it
            told[name] = traceback.format_exc(limit=-6)
            print(name, told[name], flush=True)
        if "FSDP_TEST_TIMES" in os.environ:
            print(f"{time.monotonic() - started:.2f} s", name, flush=True)
        keep(told)
        meet(f"after {name}")
    leave()


def keep(told: Mapping[str, str]) -> None:
    """What is known so far, where the test finds it also after this process was killed."""
    file = Path(sys.argv[1]) / f"{dist.get_rank()}.json"
    file.write_text(json.dumps(told))


def meet(place: str) -> None:
    """Returns when all ranks are here; by the store, since a rank that failed has no collective in step."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place} / {dist.get_rank()}", "")
    try:
        store.wait(
            [f"{place} / {rank}" for rank in range(dist.get_world_size())],
            timedelta(seconds=TOGETHER_SECONDS),
        )
    except dist.DistStoreError:
        print(f"rank {dist.get_rank()}: not all ranks came to: {place}", flush=True)
        os._exit(1)


def leave() -> None:
    """Rank 0 holds the store: it goes last."""
    store = dist.distributed_c10d._get_default_store()
    others = [f"left / {rank}" for rank in range(1, dist.get_world_size())]
    if dist.get_rank() == 0:
        store.wait(others, timedelta(seconds=TOGETHER_SECONDS))
    else:
        store.set(f"left / {dist.get_rank()}", "")
    dist.destroy_process_group()
