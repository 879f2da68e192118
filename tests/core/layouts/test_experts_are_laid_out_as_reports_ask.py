"""Public reports of expert tensors in another layout than the receiver's, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.expert_layout import expert_ranges, transposed_experts

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


def test_each_share_of_the_experts_is_the_report_s() -> None:
    told = REPORTS["mo-14"]
    ranges = expert_ranges(told["input"]["num_experts"], told["input"]["ep_size"])
    assert {str(part): list(item) for part, item in enumerate(ranges)} == told["expected"]["ranges"]


@pytest.mark.parametrize("experts", range(7))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_every_expert_is_in_one_share_and_none_is_empty_without_need(experts: int, parts: int) -> None:
    ranges = expert_ranges(experts, parts)
    assert [expert for start, stop in ranges for expert in range(start, stop)] == list(range(experts))
    assert len(ranges) == parts
    assert sum(stop == start for start, stop in ranges) == max(0, parts - experts)


@pytest.mark.parametrize(("experts", "parts"), [(4, 0), (-1, 2)])
def test_shares_that_cannot_be_are_refused(experts: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{experts} experts"):
        expert_ranges(experts, parts)


def test_both_projections_of_gpt_oss_are_transposed_with_their_rows_in_order() -> None:
    told, wanted = REPORTS["mo-11"]["input"], REPORTS["mo-11"]["expected"]
    assert told["hidden"] != told["inter"], "equal sizes would hide a transposition that was left out"
    for given, made in (("fc1_out_in", "gate_up_proj"), ("fc2_out_in", "down_proj")):
        fused = transposed_experts([torch.tensor(told[given])] * told["E"])
        assert fused.tolist() == wanted[made]
        assert list(fused.shape) == wanted[f"{made}_shape"]
        assert fused.is_contiguous()
