"""How fast an FSDP2 model is exported, and with how much memory beside its shard.

    python benchmarks/fsdp_export.py [--ranks 2] [--size 4b|tiny] [--syncs 5] [--device cuda|cpu] [--out FILE]

Compared with `full_tensor()` on one parameter after the other, which is what hand-written syncs do. Both are
drained on every rank, and each tensor is dropped before the next bucket, or parameter, is asked for. Seconds
are medians; `peak` is what was allocated at most beyond what the model itself takes (GPU only). Before it is
measured, every tensor is compared with `full_tensor()`, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightlane.testing.rank_export import RankExport, Wished, export_of
from weightlane.testing.ranks import RankGroup
from weightlane_fsdp import plugin
from weightlane_fsdp.eras import ERAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

SIZES: dict[str, dict[str, int]] = {
    # Qwen3-4B's sizes, and a model that a CPU exports in a second.
    "4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}
SECONDS = 540.0


def build(size: str, device: torch.device) -> nn.Module:
    """Sharded while it has no data, then filled with noise: no rank ever holds the whole."""
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES[size], tie_word_embeddings=True)).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.normal_(std=0.02)
    return model  # type: ignore[no-any-return]


def stream(export: RankExport) -> Iterable[list[tuple[int, Tensor]]]:
    with export.plugin.weightlane_export_params(export.context) as buckets:
        yield from buckets


def drain(export: RankExport) -> None:
    for bucket in stream(export):
        assert bucket


def drain_full_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.full_tensor()  # type: ignore[operator]


def compare(export: RankExport, model: nn.Module) -> int:
    """How many tensors are equal; raises for one that is not."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    same = 0
    for bucket in stream(export):
        for number, tensor in bucket:
            name = export.context.tensors[number].name
            if name in parameters:  # a tied head is one of them under another name
                assert torch.equal(tensor, parameters[name].full_tensor()), name
                same += 1
    return same


def measure(action: Callable[[], None], syncs: int, device: torch.device) -> dict[str, float | None]:
    seconds = []
    before = peak = 0
    if device.type == "cuda":
        action()  # makes communicators and fills the allocator
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(syncs):
        dist.barrier()
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    return {
        "seconds": round(statistics.median(seconds), 4),
        "worst_seconds": round(max(seconds), 4),
        "peak_megabytes": round(peak / 1e6, 1) if device.type == "cuda" else None,
    }


def rank_main(options: argparse.Namespace) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS))
    model = build(options.size, device)
    with export_of(plugin, ERAS[0], model, Wished()) as export:
        same = compare(export, model)
        # The embedding is the largest tensor; what else is alive is told in buckets of 64 MiB.
        found = {
            "tensors": same,
            "bytes": export.manifest.nbytes,
            "largest_megabytes": round(max(spec.nbytes for spec in export.manifest.tensors) / 1e6, 1),
            "weightlane": measure(lambda: drain(export), options.syncs, device),
            "full_tensor": measure(lambda: drain_full_tensors(model), options.syncs, device),
        }
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        told = {"size": options.size, "ranks": options.ranks, "device": where, "torch": torch.__version__}
        print("RESULT " + json.dumps({**told, **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return 0
    words = [__file__, f"--ranks={options.ranks}", f"--size={options.size}", f"--syncs={options.syncs}"]
    with RankGroup([*words, f"--device={options.device}"], options.ranks) as group:
        outcomes = group.wait(SECONDS)
    failed = [outcome.output for outcome in outcomes if outcome.status]
    if failed:
        print(failed[0], file=sys.stderr)
        return 1
    lines = [line for outcome in outcomes for line in outcome.output.splitlines()]
    result = json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
