"""Trainers of live tests: models that change, and what they say themselves about the same prompts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightlane.messages import Generation

PROBE_PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99))


@dataclass(frozen=True)
class Truth:
    """Greedy continuations and the log-probs of their tokens, by the trainer's model."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def distance(self, generations: Sequence[Generation]) -> float:
        """Largest difference of a chosen token's log-prob; infinite when tokens differ."""
        if tuple(generation.token_ids for generation in generations) != self.tokens:
            return float("inf")
        return _largest_difference([generation.logprobs for generation in generations], self.logprobs)


class Trainer:
    """A model that changes, and what it says itself."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def truth(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Truth:
        tokens, logprobs = [], []
        for prompt in prompts:
            ids, chosen = list(prompt), []
            for _ in range(max_tokens):
                row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1].float(), -1)
                ids.append(int(row.argmax()))
                chosen.append(float(row[ids[-1]]))
            tokens.append(tuple(ids[len(prompt) :]))
            logprobs.append(tuple(chosen))
        return Truth(tuple(tokens), tuple(logprobs))

    @torch.no_grad()
    def change(self, seed: int, scale: float = 0.05) -> float:
        """Moves every parameter; gives by how much that moved the model's own log-probs."""
        before = self.truth(PROBE_PROMPTS, 4)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            spread = float(parameter.std()) or 1.0
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * spread)
        return _largest_difference(self._logprobs_of(before), before.logprobs)

    def _logprobs_of(self, truth: Truth) -> list[tuple[float, ...]]:
        rows = []
        for prompt, tokens in zip(PROBE_PROMPTS, truth.tokens, strict=True):
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])
            rows.append(tuple(chosen[:, 0].tolist()))
        return rows


class AdapterTrainer(Trainer):
    """A base that stays, wrapped by peft; the adapter on all of its linear layers changes."""

    def __init__(self, folder: Path, name: str = "default", **fields: Any) -> None:
        super().__init__(folder)
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields})
        with warnings.catch_warnings():
            # peft asks transformers for a name that the latter is about to drop.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            self.model = get_peft_model(self.model, config, adapter_name=name).train(mode=False)
        self.change(seed=0)

    @torch.no_grad()
    def change(self, seed: int, scale: float = 0.1) -> float:
        """Moves every matrix; gives by how much that moved the model's own log-probs."""
        before = self.truth(PROBE_PROMPTS, 4)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return _largest_difference(self._logprobs_of(before), before.logprobs)


def _largest_difference(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    return max(
        abs(one - other)
        for ours, theirs in zip(some, others, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
