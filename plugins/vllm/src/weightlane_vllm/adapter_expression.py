"""How vLLM takes an adapter: which slots it needs, in which form, with which features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import SLOTS_NEEDED, AdapterExpression
from weightlane.errors import PlanError, Problem
from weightlane.peft import peft_json
from weightlane_vllm.adapter_refusals import LORA_OFF, launch_problems
from weightlane_vllm.facts import LORA_PATTERNS

if TYPE_CHECKING:
    from weightlane.adapters import AdapterForm, SwapPolicy
    from weightlane.contexts import ExpressAdapterContext

PATTERNS = ("rank_pattern", "alpha_pattern")

_NOTES: dict[SwapPolicy, str] = {
    "two_slot": "the adapter served before goes on serving until the new one is published",
    "paused": "weightlane's front holds generation back from the first message of a sync until it is "
    "published; nobody does for the owner of an LLM object",
}


def express(context: ExpressAdapterContext) -> AdapterExpression:
    """peft's own keys, either policy; as trained, but where the engine ignores ranks and scales of modules.

    Raises:
        PlanError: the engine was started without LoRA, for a smaller rank, or with fewer slots than the
            policy needs.
    """
    facts, adapter = context.facts, context.adapter
    receiver = f"vLLM {facts.version}"
    problems = launch_problems(adapter, facts, receiver=receiver)
    if LORA_OFF not in problems:
        problems += _slot_problems(int(facts.launch_arguments["max_loras"]), context.swap)
    if problems:
        raise PlanError(problems)
    carried = PATTERNS if facts.attributes.get(LORA_PATTERNS) else ()
    form: AdapterForm = "as-trained" if set(PATTERNS).isdisjoint(adapter.needs) or carried else "normal"
    return AdapterExpression(
        swap=context.swap,
        wire=peft_json(adapter),
        notes=(_NOTES[context.swap],),
        carries=carried,
        form=form,
    )


def _slot_problems(slots: int, swap: SwapPolicy) -> list[Problem]:
    needed = SLOTS_NEEDED[swap]
    if slots >= needed:
        return []
    what = f"swap {swap} needs {needed} LoRA slots, and the engine was started with {slots}"
    fix = f'Start it with --max-loras {needed}, or connect with swap="paused".'
    return [Problem("adapter-swap", "max_loras", what, fix)]
