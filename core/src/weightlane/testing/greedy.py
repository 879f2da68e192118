"""A transformers model as the trainer's own word on what a rollout should say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids chosen after one prompt, and their log-probs (natural log, fp32)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@torch.no_grad()
def greedy_continuations(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Continuation]:
    """Greedy continuations without a cache and without batching: slow, and hard to get wrong."""
    return [_continue(model, prompt, max_tokens) for prompt in prompts]


@torch.no_grad()
def greedy_choices(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], given: Sequence[Sequence[int]]
) -> list[Continuation]:
    """What the model prefers at each place of given continuations, in one forward pass a prompt.

    Where its tokens are the given ones they are its greedy continuation: each was preferred after the
    prompt and the tokens before it.
    """
    found: list[Continuation] = []
    for prompt, token_ids in zip(prompts, given, strict=True):
        best = _logprob_rows(model, prompt, token_ids).max(dim=-1)
        found.append(Continuation(tuple(best.indices.tolist()), tuple(best.values.tolist())))
    return found


@torch.no_grad()
def forced_logprobs(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], continuations: Sequence[Continuation]
) -> list[Tensor]:
    """Log-probs that the model gives to given continuations; one tensor of shape (tokens,) a prompt."""
    found: list[Tensor] = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        rows = _logprob_rows(model, prompt, continuation.token_ids)
        found.append(rows.gather(1, torch.tensor(continuation.token_ids)[:, None]).squeeze(1))
    return found


def _logprob_rows(model: torch.nn.Module, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """Log-probs of every token at each place of a continuation, shape (tokens, vocabulary), fp32."""
    logits = model(input_ids=torch.tensor([[*prompt, *token_ids]]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def _continue(model: torch.nn.Module, prompt: Sequence[int], max_tokens: int) -> Continuation:
    ids = list(prompt)
    logprobs: list[float] = []
    for _ in range(max_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        row = torch.log_softmax(logits, dim=-1)
        token = int(row.argmax())
        ids.append(token)
        logprobs.append(float(row[token]))
    return Continuation(tuple(ids[len(prompt) :]), tuple(logprobs))
