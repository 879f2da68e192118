"""Models of these tests, how they change, and what a trainer and an engine say."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from weightlane.testing.greedy import forced_logprobs, greedy_choices
from weightlane.types import Mode

if TYPE_CHECKING:
    from weightlane.lane import Lane

PROMPTS = ([1, 2, 3], [7, 11, 13])
TOKENS = 5
TARGETS = ("q_proj", "v_proj", "down_proj")
MODULES = 2 * len(TARGETS)


def make_base(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def wrapped(folder: str, name: str = "default", **config: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), **config}
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers for a name that the latter is about to drop.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(1)
        model: Any = get_peft_model(base, LoraConfig(**fields), adapter_name=name)
    model.train(mode=False)
    train_step(model, seed=0)
    return model


def train_step(model: Any, *, seed: int, size: float = 0.1) -> None:
    """Seeded noise on every matrix of every adapter, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def engine_says(lane: Lane, replica: int = 0, **options: Any) -> tuple[Any, ...]:
    """What it answers to the request that a lane's user would make, or to one with other `options`."""
    if not options and lane.plan().mode is Mode.ADAPTER:
        options = {"adapter": lane.adapter_ref()}
    return lane.replicas[replica].generate(PROMPTS, max_tokens=TOKENS, **options)


def apart(model: Any, said: tuple[Any, ...]) -> float:
    """How far the engine's log-probs are from the model's, whose greedy tokens its tokens must be."""
    mine = greedy_choices(model, PROMPTS, [item.token_ids for item in said])
    assert [item.token_ids for item in mine] == [item.token_ids for item in said]
    return max(
        abs(a - b)
        for x, y in zip(mine, said, strict=True)
        for a, b in zip(x.logprobs, y.logprobs, strict=True)
    )


def moved(model: Any, seed: int, size: float = 0.1) -> float:
    """Trains a step; how far the log-probs of the model's own words moved by it."""
    words = greedy_choices(model, PROMPTS, [[1] * TOKENS] * len(PROMPTS))
    before = forced_logprobs(model, PROMPTS, words)
    train_step(model, seed=seed, size=size)
    after = forced_logprobs(model, PROMPTS, words)
    return max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
