"""The demo's own model: a random Llama that is small enough to learn something visible in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.types import Mode

if TYPE_CHECKING:
    from pathlib import Path


ADAPTER = "default"
LORA_RANK = 16


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


def load_actor(folder: str, *, trainer: str, mode: str, seed: int) -> Any:
    """The trainer's copy of a checkpoint: float32, on CPU, without dropout.

    In modes merged and adapter peft wraps it: LoRA on all linear layers, of which alone it then learns. With
    trainer `fsdp` it is sharded over all ranks (FSDP2), a unit a decoder layer and one for the rest.

    Raises:
        EngineError: transformers cannot load the folder.
    """
    from weightlane.reference.engine import load_model

    model = load_model(folder, "float32").eval()
    if mode != Mode.FULL.value:
        model = _with_lora(model, seed=seed)
    if trainer == "fsdp":
        _shard(model)
    return model


def architecture_of(model: Any) -> str:
    """The class of the model, below peft's wrapper and FSDP's."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__.removeprefix("FSDP")


def parameter_count(model: Any) -> int:
    """Elements of all parameters, of every rank's shard; tied ones count once."""
    return sum(int(parameter.numel()) for parameter in model.parameters())


def _with_lora(model: Any, *, seed: int) -> Any:
    import warnings

    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers for a name that the latter is about to drop.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(seed)  # the same matrices on every rank
        return get_peft_model(model, config, adapter_name=ADAPTER)


def _shard(model: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
