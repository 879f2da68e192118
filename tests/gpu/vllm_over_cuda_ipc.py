"""A program: what a real vLLM on a GPU holds and says after syncs, beside ones that read the same from files.

One engine is synced in modes full, merged and adapter by this process, on the same GPU, over `cuda_ipc`. Two
others are started from the same weights: as trained, and with the adapter merged. Every live tensor must have
the same bits, and what they say must not be told apart (`told_apart.py`), or be equal where vLLM is asked for
kernels that say the same each time (`--kernels batch-invariant`). Ten syncs of each mode must leave the GPU's
free memory where it was. Figures go to OUT/figures.json, whatever happened.

    python tests/gpu/vllm_over_cuda_ipc.py OUT [--tensor-parallel 2] [--modes adapter]
    python tests/gpu/vllm_over_cuda_ipc.py OUT --size tiny --device cpu --transport shm
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from proof_words import BATCH_INVARIANT
from run_proof import prove, status_of
from run_spread import Said
from vllm_proof import VllmProof

MODES = ("full", "merged", "adapter")


class Follower(VllmProof):
    """Every rank but 0: the same models and lanes, no engine, and nothing to tell."""

    def say(self, text: str) -> None: ...

    def check(self, name: str, passed: bool, told: Any) -> None: ...

    def engine(self, name: str, model: Path, *more: str) -> Any: ...

    def hashes(self, engine: Any, adapter: Any = None) -> list[dict[str, Any]]:
        return [{"live": {}, "lora": {}}] * self.options.tensor_parallel

    def said(self, engine: Any, adapter: Any = None) -> Said:
        return Said((), ())

    def same_words(self, name: str, synced: Any, other: Any) -> None: ...

    def other_words(self, name: str, synced: Any, other: Any) -> None: ...

    def scored(self, *sides: Any) -> list[list[Said]]:
        return []

    def judged(self, ours: Any, right: Any, wrong: Any) -> None: ...

    def rollout(self, engine: Any) -> None: ...


def join_ranks(options: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    """With more than one rank: meets the others; rank 0 starts them."""
    if options.tensor_parallel == 1:
        return None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29533")}
    other = None
    if options.rank == 0:
        other = subprocess.Popen([sys.executable, *sys.argv, "--rank", "1"])
    if options.device == "cuda":
        torch.cuda.set_device(options.rank)
    torch.distributed.init_process_group("gloo", rank=options.rank, world_size=options.tensor_parallel)
    return other


def end_of(other: subprocess.Popen[bytes], *, failed: bool) -> int:
    """The status of rank 1, which waits for rank 0 for ever where that has failed."""
    if failed:
        other.terminate()
    try:
        return other.wait(60)
    except subprocess.TimeoutExpired:
        other.kill()
        return other.wait()


def main() -> int:
    """0 when every check passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--size", default="half-billion", choices=("half-billion", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--transport", default=None, help="left to the lane unless given")
    parser.add_argument("--verify", default="digest", choices=("digest", "counts"))
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--kernels", default="default", choices=("default", BATCH_INVARIANT))
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    options.expected = options.transport or "cuda_ipc"
    other = join_ranks(options)
    figures = prove(options, Follower if options.rank else VllmProof)
    if options.rank:
        return int("errors" in figures)
    if other is not None:
        figures["rank 1"] = end_of(other, failed="errors" in figures)
    return status_of(options, figures)


if __name__ == "__main__":
    raise SystemExit(main())
