"""The largest LoRA rank that vLLM is launched for: one of a fixed set. No engine, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.peft import AdapterConfig

ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""`vllm.config.lora.MaxLoRARanks` of 0.27 to 0.32; what is installed is asked where it can be."""

DEFAULT_RANK = 16
"""vLLM's own `--max-lora-rank` where none is given."""


def max_lora_rank(rank: int, allowed: Iterable[int] = ALLOWED_RANKS) -> int:
    """The `--max-lora-rank` for adapters of this rank: the smallest allowed one that is not below it.

    The adapter's own rank stays what it is.

    Args:
        rank: the largest of any module, 1 or more.
        allowed: ranks that the vLLM at hand takes.

    Raises:
        PlanError: no allowed rank is large enough, or the rank is below 1.
    """
    ranks = sorted(allowed)
    if rank < 1:
        what = f"the rank is {rank}: there is no LoRA to launch for"
        raise PlanError([Problem("peft-config", "r", what, "Launch without LoRA.")])
    fitting = [item for item in ranks if item >= rank]
    if not fitting:
        what = f"the rank is {rank}, and vLLM takes {ranks[-1]} at most"
        raise PlanError([Problem("peft-config", "r", what, "Mode merged could carry it.")])
    return fitting[0]


def rank_problems(config: AdapterConfig, launched_for: int, *, receiver: str) -> list[Problem]:
    """Modules whose rank is above what an engine was launched for; `config.rank` is the largest of them."""
    if config.rank <= launched_for:
        return []
    above = [module for module, lora in config.modules.items() if lora.rank > launched_for]
    more = f" and {len(above) - 1} more" if len(above) > 1 else ""
    what = f"rank {config.rank}, {above[0]}{more}: {receiver} was launched for {launched_for} at most"
    return [Problem("peft-config", "r", what, "Launch it with a larger --max-lora-rank.")]
