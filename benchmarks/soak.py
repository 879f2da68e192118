"""A real lane from a torch trainer into a reference engine, sync after sync, and what either process holds.

    python benchmarks/soak.py [--syncs 1000] [--transport shm inline] [--json PATH [--note TEXT]]

Prints descriptors, threads, child processes, shared memory and resident memory of trainer and engine, after a
tenth of the syncs and after all of them; `--json` also writes it, with what it ran on (see
`benchmarks/results/soak.json`). Exit status 1 when anything but resident memory grew, or that by more than
`--allowed-mib`, or when a ring or a process was left. `nox -s soak` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weightlane as wl
from weightlane.front.process import start_front_process
from weightlane.front.socket_folder import socket_folder
from weightlane.ring_file import shared_memory_folder


@dataclass(frozen=True)
class Held:
    """Of one process; `ring_bytes` counts rings that it has mapped, `children` all processes below it."""

    files: int
    threads: int
    children: int
    ring_bytes: int
    resident_mib: float


def children_of(process: int) -> int:
    """How many processes this one and its children have started and not waited for."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in {process, *found}} - found:
        found |= more
    return len(found)


def held(process: int) -> Held:
    proc = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    mappings = [line.split() for line in (proc / "maps").read_text().splitlines() if ".ring" in line]
    sizes = [[int(end, 16) for end in fields[0].split("-")] for fields in mappings]
    return Held(
        files=len(list((proc / "fd").iterdir())),
        threads=int(status["Threads"]),
        children=children_of(process),
        ring_bytes=sum(end - start for start, end in sizes),
        resident_mib=round(int(status["VmRSS"].split()[0]) / 1024, 2),
    )


def tiny_model(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def grown(early: Held, late: Held, allowed_mib: float) -> list[str]:
    """What `late` holds more of, in words."""
    found = [
        f"{name} {getattr(early, name)} -> {getattr(late, name)}"
        for name in ("files", "threads", "children", "ring_bytes")
        if getattr(late, name) > getattr(early, name)
    ]
    more = late.resident_mib - early.resident_mib
    return [*found, f"resident memory by {more:.1f} MiB"] if more > allowed_mib else found


def run(syncs: int, transport: str, allowed_mib: float) -> dict[str, object]:
    children_before = children_of(os.getpid())
    rings_before = {path.name for path in shared_memory_folder().glob("weightlane-*")}
    with tempfile.TemporaryDirectory() as folder, socket_folder() as sockets:
        model = tiny_model(Path(folder) / "model")
        address = f"unix:{sockets}/front"
        argv = [sys.executable, "-m", "weightlane.reference.server"]
        argv += ["--model", f"{folder}/model", "--address", address, "--threads", "1"]
        log = Path(folder) / "log"
        with start_front_process(argv, address, log=log, ready_timeout_seconds=120.0) as engine:
            lane = wl.connect(
                trainer=wl.trainer("torch", model=model),
                rollout=[wl.rollout("reference", url=address)],
                transport=transport,
                bucket_bytes=4096,
            )
            looks: list[dict[str, Held]] = []
            started = 0.0
            for sync in range(1, syncs + 1):
                with torch.no_grad():
                    next(model.parameters()).add_(0.001)
                report = lane.sync(version=sync)
                if report.unchanged_since is not None:
                    raise SystemExit(f"sync {sync} delivered nothing new")
                if sync in (syncs // 10, syncs):
                    gc.collect()
                    looks.append({"trainer": held(os.getpid()), "engine": held(engine.process.pid)})
                    started = started or time.monotonic()
            seconds = time.monotonic() - started
            lane.close()
            afterwards = {"trainer": held(os.getpid()), "engine": held(engine.process.pid)}
    early, late = looks
    growth = {who: grown(early[who], late[who], allowed_mib) for who in early}
    left = sorted({path.name for path in shared_memory_folder().glob("weightlane-*")} - rings_before)
    children_left = children_of(os.getpid()) - children_before
    mapped = {who: look.ring_bytes for who, look in afterwards.items()}
    return {
        "syncs": syncs,
        "transport": transport,
        "milliseconds_per_sync": round(1000 * seconds / (syncs - syncs // 10), 2),
        "early": {who: asdict(look) for who, look in early.items()},
        "late": {who: asdict(look) for who, look in late.items()},
        "grown": growth,
        "rings_left": left,
        "children_left": children_left,
        "ring_bytes_after_close": mapped,
        "ok": not any(growth.values()) and not left and not children_left and not any(mapped.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=1000)
    parser.add_argument("--transport", choices=("shm", "inline"), nargs="+", default=["shm"])
    parser.add_argument("--allowed-mib", type=float, default=8.0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    parser.add_argument("--note", default="", help="what a reader of the results must know of the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "weightlane": wl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "note": arguments.note,
        "runs": [run(arguments.syncs, name, arguments.allowed_mib) for name in arguments.transport],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    return 0 if all(one["ok"] for one in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
