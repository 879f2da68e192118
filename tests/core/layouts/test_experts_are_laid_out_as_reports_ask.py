"""Public reports of expert tensors in another layout than the receiver's, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

REPORTS: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "name_cases.json").read_text())
}


def test_fused_experts_become_one_tensor_per_expert_and_projection() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weightlane.export.recipe import Source
    from weightlane.export.recipes import recipes
    from weightlane.types import Phase

    told, wanted = REPORTS["mo-01"]["input"], REPORTS["mo-01"]["expected"]["result"]
    fused = {
        told["name"]: tuple(told["shape"]),
        **{name: tuple(shape) for name, shape in told["also"].items()},
    }
    experts, rows, hidden = told["shape"]
    sizes = {"num_experts": experts, "moe_intermediate_size": rows // 2, "hidden_size": hidden}
    small = {"num_experts_per_tok": 1, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 4}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **small, **heads))
    sources = {name: Source(name, shape, "float32") for name, shape in fused.items()}
    whole = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in fused.items()
    }
    made = {
        recipe.name: recipe.make([whole[key] for key in recipe.sources])
        for recipe in recipes(model, sources, Phase.FULL)
    }
    assert {name: list(tensor.shape) for name, tensor in made.items()} == wanted
    for expert in range(experts):
        holder = f"{told['name'].rpartition('.')[0]}.{expert}"
        assert torch.equal(made[f"{holder}.gate_proj.weight"], whole[told["name"]][expert, : rows // 2])
        assert torch.equal(made[f"{holder}.up_proj.weight"], whole[told["name"]][expert, rows // 2 :])


def test_fused_experts_of_gpt_oss_travel_as_its_checkpoint_holds_them() -> None:
    """Gate and up of one feature side by side, both projections transposed: as the model itself has them."""
    from transformers import GptOssConfig, GptOssForCausalLM

    from weightlane.export.recipe import Source
    from weightlane.export.recipes import recipes
    from weightlane.types import Phase

    told, wanted = REPORTS["mo-11"]["input"], REPORTS["mo-11"]["expected"]
    assert told["hidden"] != told["inter"], "equal sizes would hide a transposition"
    sizes = {
        "num_local_experts": told["E"],
        "hidden_size": told["hidden"],
        "intermediate_size": told["inter"],
    }
    small = {"num_experts_per_tok": 1, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    special = {"pad_token_id": 0, "eos_token_id": 1}
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**sizes, **small, **heads, **special))
    for given, leaf in (("fc1_out_in", "gate_up_proj"), ("fc2_out_in", "down_proj")):
        name = f"model.layers.0.mlp.experts.{leaf}"
        held = torch.tensor(told[given], dtype=torch.float32).T.contiguous()[None]
        assert model.get_parameter(name).shape == held.shape
        (recipe,) = recipes(model, {name: Source(name, tuple(held.shape), "float32")}, Phase.FULL)
        made = recipe.make([held])
        assert (recipe.name, made.tolist()) == (name, wanted[leaf])
        assert list(made.shape) == wanted[f"{leaf}_shape"]
