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


def run(cases: Mapping[str, Callable[[], None]]) -> None:
    """Every rank starts each case together with the others, also after one that failed on some rank."""
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
        dist.barrier()
        started = time.monotonic()
        try:
            case()
            told[name] = ""
        except Exception:  # noqa: BLE001 - whatever it is, the test of this case tells it
            told[name] = traceback.format_exc(limit=-6)
            if only:
                print(name, told[name], flush=True)
        if "FSDP_TEST_TIMES" in os.environ:
            print(f"{time.monotonic() - started:.2f} s", name, flush=True)
    folder = Path(sys.argv[1])
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
