from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.checkpoint import checkpoint_tensors_of_model, expected_tensors_of_config
from weightlane.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen3(*, tied: bool) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_the_saved_checkpoint(tmp_path: Path, tied: bool) -> None:
    import torch
    from safetensors import safe_open
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng():
        Qwen3ForCausalLM(qwen3(tied=tied)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        on_disk = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    expected = {tensor.name: tensor for tensor in expected_tensors_of_config(tmp_path)}
    assert {name: item.shape for name, item in expected.items() if not item.tied_to} == on_disk
    ties = {name: item.tied_to for name, item in expected.items() if item.tied_to}
    assert ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_fused_experts_are_expected_under_their_checkpoint_names() -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    expected = {tensor.name: tensor.shape for tensor in expected_tensors_of_config(config)}
    for layer in range(2):
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            assert expected[f"{prefix}.gate_proj.weight"] == (32, 64)
            assert expected[f"{prefix}.up_proj.weight"] == (32, 64)
            assert expected[f"{prefix}.down_proj.weight"] == (64, 32)
    assert not [name for name in expected if "gate_up" in name]


def test_persistent_buffers_count_and_others_do_not() -> None:
    import torch

    from weightlane.checkpoint import build_on_meta

    model = build_on_meta(qwen3(tied=False))
    model.model.norm.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    model.model.norm.register_buffer("table", torch.zeros(4), persistent=False)
    found = {item.canonical: item for item in checkpoint_tensors_of_model(model)}
    assert (found["model.norm.steps"].shape, found["model.norm.steps"].dtype) == ((), "int64")
    assert "model.norm.table" not in found


def test_nothing_global_changes_and_no_memory_is_taken() -> None:
    import torch

    from weightlane.checkpoint import build_on_meta

    state = torch.random.get_rng_state()
    config = qwen3(tied=False)
    config.dtype = torch.bfloat16
    model = build_on_meta(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.get_default_dtype() is torch.float32
    assert torch.empty(1).device.type == "cpu"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_folder_or_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no config\.json"):
        expected_tensors_of_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(EngineError, match="no-such-model"):
        expected_tensors_of_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(EngineError, match="cannot build a causal language model"):
        expected_tensors_of_config(str(tmp_path))
