"""Checkpoints of two layers, random and small: one for each thing that names depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the CPU attention kernel takes no smaller one
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so that outputs of two sets of weights differ
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def make(kind: str, folder: Path) -> Path:
    """`dense`, `tied` (with a vocabulary that the engine pads from 500 to 512) or `experts`."""
    target = folder / kind
    if target.exists():
        return target
    torch.manual_seed(0)
    model: Any
    if kind == "experts":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **_EXPERTS))
    elif kind == "tied":
        model = Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "tie_word_embeddings": True, "vocab_size": 500}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON))
    model.save_pretrained(target)
    return target
