"""How the reference engine takes an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import AdapterExpression
from weightlane.peft import peft_json

if TYPE_CHECKING:
    from weightlane.peft import AdapterConfig


def express(config: AdapterConfig) -> AdapterExpression:
    """peft's own keys, two slots, as trained: each module has the rank and scale that it was trained with.

    Nothing of it is padded or folded, so that what is compared with this engine is the adapter itself.
    """
    return AdapterExpression(
        swap="two_slot",
        wire=peft_json(config),
        notes=("the adapter served before goes on serving until the new one is published",),
        carries=("rank_pattern", "alpha_pattern"),
    )
