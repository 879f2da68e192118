"""Tiny models, the same on every rank: dense, tied, uneven, with buffers, and with fused experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def dense(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two Llama layers with sizes that two ranks do not share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=127,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return LlamaForCausalLM(config).to(dtype)


def even(dtype: torch.dtype = torch.float32) -> nn.Module:
    """As `dense`, in sizes that tensor parallelism takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def experts() -> nn.Module:
    """Qwen3-MoE: transformers 5 holds its experts fused."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(13)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


def with_buffers() -> nn.Module:
    """DeepSeek V3: its router has a correction bias that training moves, a persistent buffer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(14)
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        tie_word_embeddings=False,
    )
    return DeepseekV3ForCausalLM(config)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, what an FSDP unit is made of."""
    found: Any = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(found)


def disturb(model: nn.Module, seed: int = 5) -> nn.Module:
    """Moves every parameter and persistent float buffer away from its initial value, LoRA's B too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05)
    return model
