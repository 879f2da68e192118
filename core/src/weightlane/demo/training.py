"""Policy gradient on sampled tokens: the reward, the loss, the step, and what all ranks must agree on.

Collectives run in the default group, whose timeout `weightlane.demo.rank` sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.demo.settings import Lesson
    from weightlane.messages import Generation


@dataclass(frozen=True, slots=True)
class Samples:
    """Continuations of equally long prompts, short ones padded on the right.

    `sequences` (samples, prompt + new tokens) int64; `mask` (samples, new tokens) bool, False on padding;
    `rollout_logprobs` (samples, new tokens) float64, as the engine reported them.
    """

    sequences: Tensor
    mask: Tensor
    rollout_logprobs: Tensor

    @property
    def tokens(self) -> Tensor:
        """The new tokens, (samples, new tokens) int64."""
        return self.sequences[:, -self.mask.shape[1] :]

    def rows(self, rank: int, ranks: int) -> Samples:
        """Every `ranks`-th sample, beginning with number `rank`."""
        return Samples(
            self.sequences[rank::ranks], self.mask[rank::ranks], self.rollout_logprobs[rank::ranks]
        )


def draw_prompts(lesson: Lesson, *, step: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same on every rank."""
    stream = torch.Generator().manual_seed(lesson.seed * 1_000_003 + step)
    shape = (lesson.prompts, lesson.prompt_tokens)
    prompts: list[list[int]] = torch.randint(0, vocabulary, shape, generator=stream).tolist()
    return prompts


def samples_of(
    prompts: Sequence[Sequence[int]], generations: Sequence[Generation], *, new_tokens: int
) -> Samples:
    """The engine's answer as tensors."""
    start = len(prompts[0])
    sequences = torch.zeros(len(prompts), start + new_tokens, dtype=torch.int64)
    mask = torch.zeros(len(prompts), new_tokens, dtype=torch.bool)
    logprobs = torch.zeros(len(prompts), new_tokens, dtype=torch.float64)
    for row, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        length = len(generation.token_ids)
        sequences[row, : start + length] = torch.tensor([*prompt, *generation.token_ids])
        mask[row, :length] = True
        logprobs[row, :length] = torch.tensor(generation.logprobs, dtype=torch.float64)
    return Samples(sequences, mask, logprobs)


def share_samples(samples: Samples | None, lesson: Lesson) -> Samples:
    """Hands rank 0's samples to all ranks; the others pass None. A collective."""
    if samples is None:
        shape = (lesson.prompts, lesson.new_tokens)
        samples = Samples(
            torch.zeros(lesson.prompts, lesson.prompt_tokens + lesson.new_tokens, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.float64),
        )
    for tensor in (samples.sequences, samples.mask.view(torch.uint8), samples.rollout_logprobs):
        dist.broadcast(tensor, src=0)  # bounded by the group's timeout
    return samples


def rewards_of(tokens: Tensor) -> Tensor:
    """1 for an even token id, 0 for an odd one: about a half to begin with, whatever the model."""
    return (tokens % 2 == 0).to(torch.float32)


def actor_logits(model: Any, samples: Samples) -> Tensor:
    """Logits, float32, (samples, new tokens, vocabulary), at the places that predict the new tokens."""
    logits: Tensor = model(input_ids=samples.sequences, use_cache=False).logits
    return logits[:, -samples.mask.shape[1] - 1 : -1].float()


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs (natural log) of `tokens`, in their shape."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train_step(model: Any, optimizer: torch.optim.Optimizer, samples: Samples, rank: int) -> Tensor:
    """One REINFORCE step on all samples, each rank working on its share. A collective.

    The advantage of a token is its reward less the mean reward of the batch; a token is credited with
    its own reward only. Gradients are summed over ranks, so the copies stay equal bit by bit. A
    sharded model's are averaged by FSDP itself, which the loss makes good.

    Returns:
        Log-probs of the sampled tokens under the weights before the step, float32, (samples, new tokens),
        the same on every rank.
    """
    ranks = dist.get_world_size()
    mine = samples.rows(rank, ranks)
    rewards, sampled = rewards_of(samples.tokens), samples.mask.sum()
    baseline = (rewards * samples.mask).sum() / sampled
    optimizer.zero_grad(set_to_none=True)
    logprobs = chosen_logprobs(actor_logits(model, mine), mine.tokens)
    advantages = (rewards_of(mine.tokens) - baseline) * mine.mask
    loss = -(advantages * logprobs).sum() / sampled
    sharded = any(_is_sharded(parameter) for parameter in model.parameters())
    (loss * ranks if sharded else loss).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None and not sharded:
            dist.all_reduce(parameter.grad)  # bounded by the group's timeout
    optimizer.step()
    return _gather_rows(logprobs.detach(), ranks)


def copies_are_equal(model: Any) -> bool:
    """Whether every rank holds the same bits, but for shards, of which there is one of each. A collective."""
    hasher = xxhash.xxh3_64()
    for parameter in model.parameters():
        if _is_sharded(parameter):
            continue
        hasher.update(parameter.detach().reshape(-1).view(torch.uint8).numpy())
    mine = torch.tensor([hasher.intdigest() >> 1], dtype=torch.int64)  # int64 has no room for the last bit
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)  # bounded by the group's timeout
    return len({int(digest) for digest in found}) == 1


def _is_sharded(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _gather_rows(rows: Tensor, ranks: int) -> Tensor:
    """Puts together what `Samples.rows` dealt out."""
    parts = [torch.zeros_like(rows) for _ in range(ranks)]
    dist.all_gather(parts, rows.contiguous())  # bounded by the group's timeout
    return torch.stack(parts, dim=1).flatten(0, 1)
