"""Tiny models with something that drafts for them: their checkpoints, and trainers that hold both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from sync_packed_llm import Trainer
from tiny_checkpoints import COMMON
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MTP = "model.mtp_layers.0."


class MtpLayer(Qwen2DecoderLayer):
    """One layer of MiMo's multi-token prediction, under the names of its checkpoint."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            self.add_module(name, type(self.input_layernorm)(size))
        self.input_proj = nn.Linear(2 * size, size, bias=False)


class MtpTrainer(Trainer):
    """Trains the model and its multi-token prediction together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        layer = MtpLayer(self.model.config)
        held = load_file(folder / "model.safetensors")
        layer.load_state_dict({name[len(MTP) :]: item for name, item in held.items() if name.startswith(MTP)})
        self.model.model.mtp_layers = nn.ModuleList([layer])

    @property
    def layer(self) -> Any:
        return self.model.model.mtp_layers[0]

    def drafts_with(self) -> dict[str, Tensor]:
        """What vLLM's drafter is to hold of its own, by its names there: two layers are before it."""
        state = dict(self.layer.state_dict())
        for whole, pieces in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            path = whole.rpartition(".")[0]
            for leaf in ("weight", "bias"):
                parts = [state.pop(f"{path}.{piece}_proj.{leaf}", None) for piece in pieces]
                if parts[0] is not None:
                    state[f"{whole}.{leaf}"] = torch.cat(parts)
        block = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        return {
            f"model.mtp_layers.2.{'mtp_block.' if name.startswith(block) else ''}{name}": tensor
            for name, tensor in state.items()
        }


def mtp_checkpoint(folder: Path) -> Path:
    """MiMo's architecture: two dense layers, and one of multi-token prediction in the same checkpoint."""
    target = folder / "mtp"
    if target.exists():
        return target
    torch.manual_seed(0)
    # vLLM's Qwen2 takes the size of a head from the hidden size alone.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**{**COMMON, **heads})
    Qwen2ForCausalLM(config).save_pretrained(target)
    layer = MtpLayer(config)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.15 + (parameter.dim() == 1)
    held = load_file(target / "model.safetensors")
    held.update({f"{MTP}{name}": item for name, item in layer.state_dict().items()})
    save_file(held, target / "model.safetensors", {"format": "pt"})
    told = json.loads((target / "config.json").read_text())
    told |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(told))
    return target


def qwen3_checkpoint(folder: Path, layers: int, seed: int) -> Path:
    """One that serves, or one that drafts with a checkpoint of its own."""
    target = folder / f"qwen3-{layers}-{seed}"
    if not target.exists():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "num_hidden_layers": layers})).save_pretrained(target)
    return target


def eagle3_checkpoint(folder: Path) -> Path:
    """One layer over hidden states of three, a vocabulary of 128 of 512, and no embeddings of its own."""
    target = folder / "eagle3"
    target.mkdir(exist_ok=True)
    size, inner, vocabulary = COMMON["hidden_size"], COMMON["intermediate_size"], 128
    queries, keys = (COMMON[f"num_{kind}_heads"] * COMMON["head_dim"] for kind in ("attention", "key_value"))
    torch.manual_seed(3)
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (vocabulary, size),
        "midlayer.self_attn.q_proj": (queries, 2 * size),
        "midlayer.self_attn.k_proj": (keys, 2 * size),
        "midlayer.self_attn.v_proj": (keys, 2 * size),
        "midlayer.self_attn.o_proj": (size, queries),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
    }
    norms = ("norm", *(f"midlayer.{kind}" for kind in ("hidden_norm", "input_layernorm")))
    held = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    held |= {f"{name}.weight": torch.ones(size) for name in (*norms, "midlayer.post_attention_layernorm")}
    held |= {"d2t": torch.arange(vocabulary) * 3, "t2d": torch.zeros(COMMON["vocab_size"], dtype=torch.bool)}
    save_file(held, target / "model.safetensors", {"format": "pt"})
    told = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: COMMON[name] for name in COMMON if name not in ("initializer_range", "num_hidden_layers")},
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(told))
    return target
