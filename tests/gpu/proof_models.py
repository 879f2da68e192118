"""The models of the proof: a random base, the same after some training, one more with an adapter merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    # About 0.5 billion parameters: those of Qwen2-0.5B.
    "half-billion": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "initializer_range": 0.05,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "initializer_range": 0.15,
    },
}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16


@dataclass(frozen=True)
class Folders:
    """Checkpoints that engines are started from."""

    first: Path
    trained: Path
    merged: Path
    adapter: Path


def make_base(size: str, *, device: str, dtype: torch.dtype) -> Any:
    """A random Qwen2, tied as the real one of this size is."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SIZES[size],
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """Moves every parameter by a few per cent of its own spread."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in parameters.values():
        noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
        parameter.add_(
            (noise * 0.05 * (float(parameter.float().std(correction=0)) or 1.0)).to(parameter.dtype)
        )


def kept_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter, for `put_back`."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def put_back(model: Any, kept: dict[str, torch.Tensor]) -> None:
    """Gives every parameter the values that it had."""
    for name, parameter in model.named_parameters():
        parameter.copy_(kept[name])


def with_adapter(model: Any, seed: int) -> Any:
    """The model wrapped by peft, with an adapter on every linear layer that does something."""
    import warnings

    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config).train(mode=False)
    change_adapter(wrapped, seed)
    return wrapped


@torch.no_grad()
def change_adapter(wrapped: Any, seed: int) -> None:
    """New values for every matrix of the adapter, in the dtype of the layer that it is on."""
    device = next(wrapped.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
            # Rounded, so that no cast on the way changes a bit.
            parameter.copy_((noise * 0.02).bfloat16().to(parameter.dtype))


def exported_tensors(model: Any, phase: Any) -> dict[str, torch.Tensor]:
    """What a lane from this trainer sends in a phase, each tensor a copy on the CPU."""
    from weightlane.contexts import ExportContext
    from weightlane.torch_trainer.exported import exported
    from weightlane.torch_trainer.plugin import TORCH

    found = exported(ExportContext(TORCH, model, phase, rank=0, world_size=1))
    return {name: found.owned(name).detach().cpu().clone() for name in found.recipes}


def save_checkpoint(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint of these very bytes, in one file, with the model's configuration."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}  # tied
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
