"""`python -m weightlane.demo.rank`: one trainer rank of the demo. Started by the command, not by people."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.demo.messages import Broken, ModelReady
from weightlane.demo.parent import ParentLine
from weightlane.failures import failure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import TCPStore

TASK_SECONDS = 900.0
"""The command bounds the engine's start itself; this bound only ends a rank that was forgotten."""
_GROUP_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the task says; 1 after telling the command what went wrong."""
    parser = argparse.ArgumentParser(prog="weightlane.demo.rank", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--report-to", type=int, required=True, help="descriptor of the pipe for reports")
    parser.add_argument(
        "--listen-on", type=int, default=-1, help="descriptor of the store's listening socket"
    )
    parser.add_argument("--make-model", default="", help="folder in which to write the tiny model first")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    parent = ParentLine(options.report_to)
    try:
        _work(options, parent)
    except Exception as error:  # noqa: BLE001 - the command must hear of it, whatever it is
        parent.tell(Broken(failure_of(error, origin=f"trainer rank {options.rank}")))
        return 1
    return 0


def _work(options: argparse.Namespace, parent: ParentLine) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - while others start, too

    from weightlane.demo.loop import run_task
    from weightlane.demo.model import write_tiny_model

    torch.set_num_threads(1)
    if options.make_model:
        write_tiny_model(Path(options.make_model), seed=options.seed)
    if options.rank == 0:
        parent.tell(ModelReady())
    dist.init_process_group(
        "gloo",
        store=_store(options.listen_on, seconds=_GROUP_SECONDS),
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    try:
        run_task(parent.task(seconds=TASK_SECONDS), parent, rank=options.rank)
    finally:
        dist.destroy_process_group()


def _store(listen_on: int, *, seconds: float) -> TCPStore:
    """The store at MASTER_ADDR and MASTER_PORT; the rank that was given the listening socket serves it."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    from weightlane.listening_store import serve_store

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    if listen_on < 0:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return serve_store(listen_on, host=host, port=port, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
