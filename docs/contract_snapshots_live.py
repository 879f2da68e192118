#!/usr/bin/env python3
"""Makes contract snapshots of SGLang, from servers that are started for it.

    python docs/contract_snapshots_live.py PYTHON FOLDER [--newer PACKAGES]

PYTHON is the interpreter of an environment that holds SGLang and weightlane-sglang. Its model cannot be built
without data, so each layout is a server of its own, with tiny random weights, whose schedulers trace their
loader. This side needs transformers, weightlane and weightlane-sglang.
`--newer` is a folder of packages that comes before that environment's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
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
# A server takes a minute to start: each of these shows something that no other does.
LAYOUTS = (
    ("Qwen3ForCausalLM", 1, False),
    ("Qwen3ForCausalLM", 2, False),
    ("Qwen3ForCausalLM", 1, True),
    ("Qwen3MoeForCausalLM", 1, False),
    ("LlamaForCausalLM", 1, False),
)


def with_weights(folder: Path, architecture: str) -> Path:
    """A checkpoint folder with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # SGLang 0.5.18 builds experts in every layer of a Qwen3-MoE, whatever `mlp_only_layers` says.
    more = {"mlp_only_layers": []} if architecture == "Qwen3MoeForCausalLM" else {}
    model = checkpoint(folder, architecture, **more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


def main() -> int:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("python", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newer", type=Path)
    parser.add_argument("--layout", type=int, action="append", choices=range(len(LAYOUTS)))
    given = parser.parse_args()
    chosen = [LAYOUTS[number] for number in given.layout] if given.layout else LAYOUTS
    ours = loader_arguments(import_folders(given.python, "sglang", option="PYTHON"))
    made = 0
    with tempfile.TemporaryDirectory(prefix="weightlane-") as place:
        for architecture, workers, lora in chosen:
            layout = f"{architecture} tp{workers}{' lora' if lora else ''}"
            model = with_weights(Path(place), architecture)
            settings = ServerSettings(
                python=given.python,
                model=model,
                device="cpu",
                tensor_parallel=workers,
                arguments=(*ours, *(LORA if lora else ())),
                environment={"PYTHONPATH": str(given.newer)} if given.newer else {},
            )
            try:
                with launched_server(settings) as server:
                    look = look_at_live(get_registry(), "sglang", server.url, model)
                why = "; ".join(map(str, look.problems)) or ("" if look.tables else look.reason)
                if not why:
                    print(f"{layout}: {write_contract(look, given.folder)}", flush=True)  # noqa: T201
                    made += 1
                    continue
            except WeightlaneError as error:
                why = str(error)
            print(f"{layout}: none, {why}", flush=True)  # noqa: T201
    return 0 if made == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
