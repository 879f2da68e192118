#!/usr/bin/env python3
"""Makes contract snapshots of SGLang, from servers that are started for it: `nox -s contracts` runs it.

    python docs/contract_snapshots_live.py PYTHON FOLDER [--newer PACKAGES]

PYTHON is the interpreter of an environment that holds SGLang and weightlane-sglang. Its model cannot be built
without data, so each layout is a server of its own, with tiny random weights, whose schedulers trace their
loader. This side needs transformers, weightlane and weightlane-sglang.
`--newer` is a folder with another SGLang, to come before that environment's own; it gets fewer layouts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from contract_snapshots import checkpoint

from weightlane.cli.live_engine import look_at_live
from weightlane.cli.plan import write_contract
from weightlane.demo.interpreter import import_folders
from weightlane.errors import WeightlaneError
from weightlane.registry import get_registry
from weightlane_sglang.launch import ServerSettings, launched_server, loader_arguments

LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
)


@dataclass(frozen=True)
class Layout:
    """One server: what it is started with. `newer`: it is started of the other SGLang too."""

    architecture: str
    workers: int = 1
    lora: bool = False
    newer: bool = False

    def __str__(self) -> str:
        return f"{self.architecture} tp{self.workers}{' lora' if self.lora else ''}"


# A server takes a minute to start: each of these shows something that no other does. Heads are not tied:
# what holds for a head of its own serves a tied checkpoint too, which sends none. Qwen3Moe with LoRA is not
# here: the loader writes no expert then.
LAYOUTS = (
    Layout("Qwen3ForCausalLM", newer=True),
    Layout("Qwen3MoeForCausalLM", newer=True),
    Layout("LlamaForCausalLM", newer=True),
    Layout("Qwen3ForCausalLM", lora=True, newer=True),
    Layout("Qwen2ForCausalLM"),
    Layout("Qwen3ForCausalLM", workers=2, newer=True),
    Layout("Qwen3MoeForCausalLM", workers=2),
)


def with_weights(folder: Path, architecture: str) -> Path:
    """A checkpoint folder with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # SGLang builds experts in every layer of a Qwen3-MoE, whatever `mlp_only_layers` says.
    more = {"mlp_only_layers": []} if architecture == "Qwen3MoeForCausalLM" else {}
    # On CPU alone SGLang pads each rank's part of an MLP to a multiple of 32, which no snapshot is to show.
    model = checkpoint(folder, architecture, intermediate_size=128, **more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


def make(settings: ServerSettings, out: Path) -> tuple[Path | None, str]:
    """The snapshot's file, or why there is none."""
    try:
        with launched_server(settings) as server:
            look = look_at_live(get_registry(), "sglang", server.url, settings.model)
        why = "; ".join(map(str, look.problems)) or ("" if look.tables else look.reason)
        return (None, why) if why else (write_contract(look, out), "")
    except WeightlaneError as error:
        return None, str(error)


def main() -> int:
    """The command line; exit status 1 where a layout gave no snapshot."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("python", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newer", type=Path)
    parser.add_argument("--layout", action="append", choices=list(map(str, LAYOUTS)))
    given = parser.parse_args()
    chosen = [item for item in LAYOUTS if item.newer or not given.newer]
    chosen = [item for item in chosen if not given.layout or str(item) in given.layout]
    ours = loader_arguments(import_folders(given.python, "sglang", option="PYTHON"))
    made = 0
    with tempfile.TemporaryDirectory(prefix="weightlane-") as place:
        for layout in chosen:
            settings = ServerSettings(
                python=given.python,
                model=with_weights(Path(place), layout.architecture),
                device="cpu",
                tensor_parallel=layout.workers,
                arguments=(*ours, *(LORA if layout.lora else ())),
                environment={"PYTHONPATH": str(given.newer)} if given.newer else {},
            )
            written, why = make(settings, given.folder)
            print(f"{layout}: {written or f'none, {why}'}", flush=True)  # noqa: T201
            made += written is not None
    return 0 if made == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
