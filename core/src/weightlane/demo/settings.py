"""What one run of the demo is asked to do, and the limits it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2
"""Trainer ranks of a demo: the fewest that have something to agree on."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of `weightlane demo`.

    `model` is a checkpoint folder, or None for a tiny random model. `rollout_python` is the interpreter of
    the environment that holds the engine, None for this one. `url` is that of an engine which runs already,
    "" where the demo starts its own. `sync_each_step` False stops syncing after the first step.
    """

    trainer: str
    rollout: str
    mode: str
    model: Path | None
    rollout_python: Path | None
    url: str
    steps: int
    sync_each_step: bool
    report: Path


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model is taught.

    Each step samples one continuation of `new_tokens` for each of `prompts` prompts of `prompt_tokens`
    random tokens, at temperature 1, and makes one Adam step of `learning_rate`.
    """

    learning_rate: float
    prompts: int
    prompt_tokens: int = 6
    new_tokens: int = 16
    seed: int = 0


TINY_LESSON = Lesson(learning_rate=0.012, prompts=32)
"""For a tiny random model, the demo's own or one of that size."""

REAL_LESSON = Lesson(learning_rate=2e-4, prompts=8)
"""For a larger checkpoint: gentler, and with fewer samples."""

LORA_PACE = 4.0
"""How much faster LoRA's few matrices have to learn, to show as much in as many steps."""

LORA_SAMPLES = 3
"""How many times the prompts LoRA learns from: half of its matrices begin at zero, so its first steps show
little, and fewer samples than this hide it in their noise (a gain of 0.10 +- 0.03 after four steps)."""

_TINY_BYTES = 20_000_000


def lesson_for(model: Path | None, mode: str = "full") -> Lesson:
    """How to train a checkpoint folder, by the size of its weights; None is the demo's own tiny model.

    In modes merged and adapter LoRA learns in its place.
    """
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model else 1
    lesson = TINY_LESSON if 0 < weights <= _TINY_BYTES else REAL_LESSON
    if mode == "full":
        return lesson
    return msgspec.structs.replace(
        lesson, learning_rate=lesson.learning_rate * LORA_PACE, prompts=lesson.prompts * LORA_SAMPLES
    )


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run must keep to pass. The first two hold for engines that compute in float32.

    `probs_diff_mean` and `pearson` bound each step's `rollout_probs_diff_mean` (from above) and
    `rollout_actor_probs_pearson_corr` (from below); `reward_gain` is the least difference between the mean
    rewards of the last and the first quarter of the steps; `greedy_gap` is how far below the trainer's best
    log-prob a greedy token of the engine may lie.
    """

    probs_diff_mean: float = 1e-4
    pearson: float = 0.999
    reward_gain: float = 0.1
    greedy_gap: float = 1e-4


LIMITS = Limits()
