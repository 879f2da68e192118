"""Twenty architectures on the meta device: each traced, and held against the oracle or refused."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from observed_trace import Seen, compare, fill_figures, problems_of
from transformers import AutoConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import registry

from weightlane.checkpoint import expected_tensors_of_config
from weightlane.contexts import TraceModelContext
from weightlane.facts import EngineFacts
from weightlane.messages import WireTensor
from weightlane_vllm.eras import ERAS
from weightlane_vllm.meta_model import build_on_meta, engine_config
from weightlane_vllm.one_rank import clean_process, place_of_rank
from weightlane_vllm.tracing import table_key, trace_of

if TYPE_CHECKING:
    from pathlib import Path

_BODY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS: dict[str, Any] = {**_BODY, "head_dim": 32}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", _HEADS),
    "Phi3ForCausalLM": ("phi3", _BODY),
    "GPT2LMHeadModel": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 256},
    ),
    "GPTNeoXForCausalLM": ("gpt_neox", _BODY),
    "FalconForCausalLM": ("falcon", {**_BODY, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "MixtralForCausalLM": ("mixtral", {**_HEADS, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {**_BODY, **_MOE, "shared_expert_intermediate_size": 64}),
    "Gemma2ForCausalLM": ("gemma2", {**_HEADS, "tie_word_embeddings": True}),
    "Gemma3ForCausalLM": ("gemma3_text", {**_HEADS, "tie_word_embeddings": True}),
    "OlmoeForCausalLM": ("olmoe", {**_BODY, "num_experts": 4, "num_experts_per_tok": 2}),
    "GptOssForCausalLM": ("gpt_oss", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        {
            **_HEADS,
            **_MOE,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            **_HEADS,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    "Starcoder2ForCausalLM": ("starcoder2", _BODY),
    "GraniteMoeForCausalLM": ("granitemoe", {**_BODY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "MambaForCausalLM": (
        "mamba",
        {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 512},
    ),
    "Mamba2ForCausalLM": (
        "mamba2",
        {
            "hidden_size": 64,
            "state_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": 512,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
        },
    ),
    "JambaForCausalLM": (
        "jamba",
        {
            **_BODY,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {
            **_BODY,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "num_nextn_predict_layers": 0,
        },
    ),
    "BloomForCausalLM": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}),
}


def sweep(folder: Path) -> list[dict[str, Any]]:
    """What was seen of each, in order; one that vLLM cannot build tells why."""
    # vLLM asks every class what it can do in a process of its own, which imports everything anew: 15 s each.
    registry._run_in_subprocess = lambda ask: ask()
    return [asdict(_seen(name, folder / name)) for name in ARCHITECTURES]


def shared_ropes_on_meta() -> int:
    """Rotary embeddings without data that this process would hand to its next engine."""
    return sum(
        any(buffer.is_meta for buffer in rope.buffers()) for rope in rotary_embedding._ROPE_DICT.values()
    )


def shared_ropes_on_meta_without_care(folder: Path) -> int:
    """The same after a model was built outside of `clean_process`; put right again."""
    context = TraceModelContext(ERAS[0], _FACTS, str(folder), ())
    shared = rotary_embedding._ROPE_DICT
    kept = dict(shared)
    shared.clear()
    try:
        with place_of_rank(0, 1):
            build_on_meta(engine_config(context))
        return shared_ropes_on_meta()
    finally:
        shared.clear()
        shared.update(kept)


def _seen(name: str, folder: Path) -> Seen:
    kind, given = ARCHITECTURES[name]
    AutoConfig.for_model(kind, **given, architectures=[name]).save_pretrained(folder)
    seen = Seen(name)
    try:
        expected = expected_tensors_of_config(folder)
        tensors = tuple(WireTensor(item.name, item.shape, "float32") for item in expected if not item.tied_to)
        context = TraceModelContext(ERAS[0], _FACTS, str(folder), tensors)
        with clean_process(), place_of_rank(0, 1):
            config = engine_config(context)
            model = build_on_meta(config)
            begun = time.perf_counter()
            table = trace_of(model, table_key(config), tensors)
            seen.seconds = round(time.perf_counter() - begun, 3)
            fill_figures(seen, table)
            seen.problems = problems_of([table], name)
            compare(seen, model, table)
    except Exception as error:  # noqa: BLE001 - the engine's own, whatever it is
        seen.started, seen.reason = False, f"{type(error).__name__}: {str(error)[:300]}"
    return seen


_FACTS = EngineFacts("vllm", "", source="installed", launch_arguments={"dtype": "float32"})
