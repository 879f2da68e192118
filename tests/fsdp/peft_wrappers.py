"""peft's ways of wrapping the tiny models, by name, and which phases serve each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Adapted:
    """How a model gets its adapters; `name` is the one that is exported, None for the active ones."""

    wrap: Callable[[nn.Module], nn.Module]
    phases: tuple[Phase, ...]
    name: str | None = None


def lora(model: nn.Module, **config: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    given = {"r": 4, "lora_alpha": 12, "target_modules": LINEAR, "init_lora_weights": False, **config}
    return get_peft_model(model, LoraConfig(**given))  # type: ignore[arg-type,return-value]


def two(model: nn.Module) -> nn.Module:
    from peft import LoraConfig

    wrapped: Any = lora(model)
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], init_lora_weights=False)
    wrapped.add_adapter("second", config)
    wrapped.set_adapter("second")
    return wrapped  # type: ignore[no-any-return]


MERGED = (Phase.MERGED, Phase.BASE)
ALL = (*MERGED, Phase.ADAPTER)

ADAPTED: dict[str, Adapted] = {
    "lora": Adapted(lora, ALL),
    "patterns": Adapted(
        partial(lora, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 3}, use_rslora=True), MERGED
    ),
    "dora": Adapted(partial(lora, use_dora=True), MERGED),
    # A base of which a part is trained is none that an adapter could be put on.
    "saved": Adapted(partial(lora, modules_to_save=["lm_head"]), (Phase.MERGED,)),
    "two": Adapted(two, ALL, "second"),
}

FUSED = {name: item for name, item in ADAPTED.items() if name != "dora"}
"""For models whose experts are one parameter: peft refuses DoRA there."""
