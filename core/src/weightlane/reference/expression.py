"""How the reference engine takes an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import SLOTS_NEEDED, AdapterExpression
from weightlane.errors import PlanError, Problem
from weightlane.peft import peft_json

if TYPE_CHECKING:
    from weightlane.adapters import SwapPolicy
    from weightlane.contexts import ExpressAdapterContext

_NOTES: dict[SwapPolicy, str] = {
    "two_slot": "the adapter served before goes on serving until the new one is published",
    "paused": "generation is held back from the first message of a sync until it is published",
}


def express(context: ExpressAdapterContext) -> AdapterExpression:
    """peft's own keys, either policy, as trained: each module has the rank and scale it was trained with.

    Nothing of it is padded or folded, so that what is compared with this engine is the adapter itself.

    Raises:
        PlanError: the engine was started with fewer slots than the policy needs.
    """
    from weightlane.reference.engine import SLOTS

    slots, needed = int(context.facts.launch_arguments.get(SLOTS, "0")), SLOTS_NEEDED[context.swap]
    if slots and slots < needed:
        what = f"swap {context.swap} needs {needed} adapter slots, and the engine was started with {slots}"
        fix = f'Start it with --adapter-slots {needed}, or connect with swap="paused".'
        raise PlanError([Problem("adapter-swap", "reference", what, fix)])
    return AdapterExpression(
        swap=context.swap,
        wire=peft_json(context.adapter),
        notes=(_NOTES[context.swap],),
        carries=("rank_pattern", "alpha_pattern"),
    )
