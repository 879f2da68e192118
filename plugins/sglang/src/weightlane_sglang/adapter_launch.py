"""LoRA at the start of a server: what one lane in mode adapter needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import SLOTS_NEEDED
from weightlane.peft.engine_targets import ALL_LINEAR, engine_targets
from weightlane_sglang.adapter_targets import WORDS

if TYPE_CHECKING:
    from weightlane.adapters import SwapPolicy

DEFAULT_RANK = 16
"""What is launched for where no rank was told; SGLang itself has no default."""

_BASE = 1  # requests without an adapter take a place in SGLang's pool as well


def lora_arguments(rank: int, swap: SwapPolicy, *, device: str) -> tuple[str, ...]:
    """Arguments that turn LoRA on, for every linear module.

    Args:
        rank: the largest of any module; 0 where it was not told.
        swap: how the lane will swap.
        device: "cpu" takes the one backend of SGLang's that needs no GPU.
    """
    return (
        "--enable-lora",
        *("--max-lora-rank", str(rank or DEFAULT_RANK)),
        *("--lora-target-modules", *engine_targets(ALL_LINEAR, WORDS)),
        *("--max-loras-per-batch", str(lora_slots(swap))),
        *(("--lora-backend", "torch_native") if device == "cpu" else ()),
    )


def lora_slots(swap: SwapPolicy) -> int:
    """Places in the pool: for the adapters of one lane, and for requests without any."""
    return SLOTS_NEEDED[swap] + _BASE


def lora_notes(rank: int, swap: SwapPolicy) -> tuple[str, ...]:
    """What to know of these arguments."""
    told = f"rank {rank}" if rank else f"rank {DEFAULT_RANK}, since none was told (--lora-rank)"
    places = (
        f"LoRA for {told} at most, on all linear modules; {lora_slots(swap)} places in its pool: what one "
        f"lane with swap {swap} needs, and one for requests without an adapter."
    )
    return (
        places,
        "Requests name lane.adapter_ref().name as their lora_path; one that names none gets the base.",
    )
