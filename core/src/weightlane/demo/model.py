"""The demo's own model: a random Llama that is small enough to learn something visible in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write_tiny_model(folder: Path, *, seed: int) -> None:
    """Writes a Hugging Face checkpoint of a random Llama (0.15 M parameters, float32) without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # attention kernels for CPU take no smaller one
        vocab_size=512,
        max_position_embeddings=512,
        initializer_range=0.15,  # with the usual 0.02 all tokens would be about equally likely
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # so that no continuation ends early
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)


def load_actor(folder: str) -> Any:
    """The trainer's copy of a checkpoint: float32, on CPU, without dropout.

    Raises:
        EngineError: transformers cannot load the folder.
    """
    from weightlane.reference.engine import load_model

    return load_model(folder, "float32").eval()


def parameter_count(model: Any) -> int:
    """Elements of all parameters; tied ones count once."""
    return sum(int(parameter.numel()) for parameter in model.parameters())
