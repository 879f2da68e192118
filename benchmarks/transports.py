"""How fast a whole sync is over each transport: one trainer rank, one reference engine in its own process.

    python benchmarks/transports.py [--megabytes 100] [--syncs 5] [--folder DIR] [--json]

Seconds are those of the sync's report: from the call to the worker's verified report, with digests.
What transport `disk` measures is the folder's: a disk, or memory where it is a memory file system.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

import weightlane as wl
from weightlane.front.process import start_front_process
from weightlane.types import TransportName

if TYPE_CHECKING:
    import torch

TRANSPORTS = (TransportName.SHM, TransportName.INLINE, TransportName.DISK)
BUCKET_BYTES = 16 << 20
READY_SECONDS = 120.0


class Measured(msgspec.Struct, frozen=True):
    """One transport: seconds of each sync after the first, which maps memory and warms caches."""

    transport: str
    megabytes: float
    seconds: list[float]
    megabytes_per_second: float


def save_model(folder: Path, megabytes: int) -> dict[str, torch.Tensor]:
    """A float32 model of about this size, whose weights are nothing but noise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 512
    layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    vocabulary = 1024
    layers = max(1, round((megabytes * 1e6 / 4 - 2 * vocabulary * hidden) / layer))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def measure(
    transport: TransportName, url: str, weights: dict[str, torch.Tensor], syncs: int, folder: str
) -> Measured:
    lane = wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("reference", url=url)],
        transport=transport,
        bucket_bytes=BUCKET_BYTES,
        folder=folder if transport is TransportName.DISK else "",
    )
    with lane:
        reports = [lane.sync(version) for version in range(syncs + 1)]
    seconds = [report.seconds for report in reports[1:]]
    megabytes = reports[0].nbytes / 1e6
    return Measured(transport.value, megabytes, seconds, megabytes / statistics.median(seconds))


def show(found: list[Measured]) -> None:
    table = Table("transport", "MB", "median s", "worst s", "MB/s")
    for item in found:
        table.add_row(
            item.transport,
            f"{item.megabytes:.0f}",
            f"{statistics.median(item.seconds):.3f}",
            f"{max(item.seconds):.3f}",
            f"{item.megabytes_per_second:.0f}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--folder", default="")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-") as work:
        model = Path(work) / "model"
        weights = save_model(model, arguments.megabytes)
        address = f"unix:{work}/front.sock"
        argv = [sys.executable, "-m", "weightlane.reference.server"]
        argv += ["--model", str(model), "--address", address]
        log = Path(work) / "engine.log"
        with start_front_process(argv, address, log=log, ready_timeout_seconds=READY_SECONDS) as engine:
            found = [
                measure(transport, engine.address, weights, arguments.syncs, arguments.folder)
                for transport in TRANSPORTS
            ]
    if arguments.json:
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
