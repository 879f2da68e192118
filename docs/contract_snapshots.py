#!/usr/bin/env python3
"""Makes contract snapshots in an environment that holds the engine: `nox -s contracts` runs it.

    python docs/contract_snapshots.py vllm FOLDER

builds tiny models of every architecture below without data, has the engine's own loader run on them, and
writes FOLDER/VERSION/ARCHITECTURE-tpN[-lora].txt. A layout that the engine does not build is printed with its
reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from weightlane.cli.absent_engine import AbsentEngine, look_at_absent
from weightlane.cli.built_tables import traced_now
from weightlane.cli.plan import write_contract
from weightlane.errors import WeightlaneError
from weightlane.registry import get_registry

# Two layers, so that what differs from layer to layer shows, and a vocabulary that engines pad.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "use_qk_norm": True,
}
TIED = {"tie_word_embeddings": True}  # these have no other head
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **MIXTURE},
    "Gemma2ForCausalLM": {"model_type": "gemma2", "query_pre_attn_scalar": 16, **TIED},
    "Phi3ForCausalLM": {"model_type": "phi3"},
    "Glm4MoeForCausalLM": {"model_type": "glm4_moe", **GROUPED},
}


def checkpoint(folder: Path, architecture: str, **more: Any) -> Path:
    """A folder with the configuration of a tiny model; no weights are needed."""
    model = folder / architecture
    model.mkdir(exist_ok=True)
    config = {**SIZES, **ARCHITECTURES[architecture], **more, "architectures": [architecture]}
    (model / "config.json").write_text(json.dumps(config))
    return model


def snapshots(engine: str, out: Path, architectures: list[str], layouts: list[tuple[int, bool]]) -> int:
    """Writes what can be made; gives how many there were."""
    made = 0
    with tempfile.TemporaryDirectory(prefix="weightlane-") as folder:
        for architecture in architectures:
            model = checkpoint(Path(folder), architecture)
            for workers, lora in layouts:
                layout = f"{architecture} tp{workers}{' lora' if lora else ''}"
                try:
                    look = look_at_absent(
                        get_registry(), AbsentEngine(engine, workers, lora), model, traced_now
                    )
                    why = "; ".join(map(str, look.problems)) or ("" if look.tables else look.reason)
                    if not why:
                        print(f"{layout}: {write_contract(look, out)}", flush=True)  # noqa: T201
                        made += 1
                        continue
                except WeightlaneError as error:
                    why = str(error)
                print(f"{layout}: none, {why}", flush=True)  # noqa: T201
    return made


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", action="append", choices=list(ARCHITECTURES))
    given = parser.parse_args()
    layouts = [(1, False), (2, False), (1, True)]
    made = snapshots(given.engine, given.folder, given.architecture or list(ARCHITECTURES), layouts)
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
