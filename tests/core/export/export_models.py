"""Tiny models, wrapped by peft with adapters away from zero, and what recipes and streams make of them."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightlane.buckets import lay_out_buckets
from weightlane.contexts import ExportContext, StreamContext
from weightlane.export.recipe import Recipe, Source
from weightlane.export.recipes import recipes
from weightlane.manifest import Manifest, merge_rank_manifests
from weightlane.packing import dtype_name
from weightlane.plan import wire_tensors
from weightlane.receiver import NameEntry
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.export import TorchStream
from weightlane.torch_trainer.modules import named_tensors
from weightlane.torch_trainer.plugin import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from weightlane.types import Phase

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def llama(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _built(LlamaForCausalLM, LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **config})).to(
        dtype
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    return _built(GPT2LMHeadModel, GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return _built(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _built(MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, head_dim=8))


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    }  # fmt: skip
    return _built(DeepseekV3ForCausalLM, DeepseekV3Config(**sizes))


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return _built(GptOssForCausalLM, GptOssConfig(**sizes, pad_token_id=0, eos_token_id=1))


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    seen = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    text = {**SIZES, "rope_parameters": rope}
    return _built(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(text_config=text, vision_config=seen))


def wrapped(base: Any, name: str = "default", **config: Any) -> Any:
    """The base inside a PeftModel whose adapter is away from zero."""
    from peft import LoraConfig, get_peft_model

    fields = {"r": 4, "lora_alpha": 8, **({} if "target_modules" in config else {"target_modules": TARGETS})}
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(1)
        model: Any = get_peft_model(base, LoraConfig(**fields, **config), adapter_name=name)
    step(model, seed=0)
    return model.train(False)


def step(model: Any, *, seed: int, size: float = 0.1) -> None:
    """Seeded noise on whatever an adapter trains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in (".lora_", ".modules_to_save.", "_tokens_delta.")):
                noise = torch.randn(parameter.shape, generator=generator) * size
                parameter.add_(noise.to(parameter.dtype))


def merged_by_peft(model: Any) -> dict[str, Tensor]:
    """What peft itself makes of a copy."""
    with quiet():
        return {**copy.deepcopy(model).merge_and_unload().state_dict()}


def state_of(model: Any) -> dict[str, Tensor]:
    """A copy of every tensor that the model holds now."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sources_of(model: Any) -> dict[str, Source]:
    return {
        key: Source(key, tuple(tensor.shape), dtype_name(tensor.dtype))
        for key, tensor in named_tensors(model).items()
    }


def recipes_of(model: Any, phase: Phase, adapter: str | None = None) -> tuple[Recipe, ...]:
    return recipes(model, sources_of(model), phase, adapter)


def made(model: Any, phase: Phase, adapter: str | None = None) -> dict[str, Tensor]:
    """Every tensor of a phase; shapes and dtypes are what their recipes say."""
    tensors = named_tensors(model)
    found = {
        recipe.name: (recipe, recipe.make([tensors[key] for key in recipe.sources]))
        for recipe in recipes_of(model, phase, adapter)
    }
    for recipe, tensor in found.values():
        assert (tuple(tensor.shape), dtype_name(tensor.dtype)) == (recipe.shape, recipe.dtype)
    return {name: tensor for name, (_, tensor) in found.items()}


def export_of(model: Any, phase: Phase, **options: Any) -> ExportContext:
    return ExportContext(TORCH, model, phase, 0, 1, options)


def stream_of(export: ExportContext, bucket_bytes: int = 2048) -> tuple[Manifest, TorchStream]:
    manifest, problems = merge_rank_manifests([describe(export)])
    assert manifest is not None, problems
    entries = tuple(NameEntry(spec.name, spec.name, spec.dtype) for spec in manifest.tensors)
    tensors = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    buckets = lay_out_buckets(tensors, bucket_bytes=bucket_bytes)
    assert len(buckets) > 4
    return manifest, TorchStream(
        StreamContext(export, manifest, entries, tensors, buckets, None, (0,), wanted=True)
    )


def named_buckets(manifest: Manifest, buckets: Sequence[Any]) -> dict[str, Tensor]:
    """What a stream gave, by name."""
    return {manifest.tensors[number].name: tensor for bucket in buckets for number, tensor in bucket}


@contextmanager
def quiet() -> Iterator[None]:
    """peft asks transformers for a name that the latter is about to drop, and tells what merging does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _built(cls: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(config).train(False)
