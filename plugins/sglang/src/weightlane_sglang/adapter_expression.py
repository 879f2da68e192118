"""How SGLang takes an adapter: one rank, one scale, whole groups; what its launch leaves room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightlane.adapters import SLOTS_NEEDED, AdapterExpression
from weightlane.errors import PlanError, Problem
from weightlane.peft.engine_targets import engine_targets, unserved_modules
from weightlane.peft.features import MERGED
from weightlane_sglang.adapter_targets import GROUPS, NOT_SHOWN, PACKED, WORDS, served_leaves
from weightlane_sglang.loader_channel import why_not_asked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.adapters import AdapterForm, SwapPolicy
    from weightlane.contexts import ExpressAdapterContext
    from weightlane.facts import EngineFacts
    from weightlane.peft import AdapterConfig

_NOTES: dict[SwapPolicy, str] = {
    "two_slot": "the server holds each version under a name of its own; the one before is unloaded once the "
    "new one is published: requests that run with it end with it, new ones that name it are refused",
    "paused": "the server's own pause aborts requests and holds new ones back while one name changes hands",
}
_NAMELESS = "a request that names no adapter is answered with the base: SGLang has no default adapter"
_READ_BACK = "after each load every rank's live LoRA pool is compared with what was sent"
_CANARY: dict[SwapPolicy, str] = {
    "two_slot": "assumed: only that outputs with it differ from the base's is looked at",
    "paused": "assumed: the server's word alone, since nothing generates before it is published",
}


def express(context: ExpressAdapterContext) -> AdapterExpression:
    """Four keys of peft's, which are all that SGLang reads; ranks and scales of modules become one of each.

    SGLang ignores `use_rslora`, `rank_pattern`, `alpha_pattern`, `bias`, `modules_to_save` and
    `target_parameters` without a word. The first is in the alpha already; patterns and incomplete groups ask
    for the normal form; core refuses the others, which are not carried.

    Raises:
        PlanError: the server was started without LoRA, for a smaller rank, other modules or fewer adapters.
    """
    facts, adapter = context.facts, context.adapter
    receiver = f"SGLang {facts.version}"
    problems = list(_problems(facts, adapter, context.swap, receiver))
    if problems:
        raise PlanError(problems)
    weights = {item.name for worker in context.workers for item in worker.expected}
    plain = {"rank_pattern", "alpha_pattern"}.isdisjoint(adapter.needs) and not _incomplete(adapter, weights)
    form: AdapterForm = "as-trained" if plain else "normal"
    unread = why_not_asked(facts)
    proof = f"{unread}; what is bound is {_CANARY[context.swap]}" if unread else _READ_BACK
    return AdapterExpression(
        swap=context.swap,
        wire=config_json(adapter),
        notes=(_NOTES[context.swap], _NAMELESS, proof),
        form=form,
        groups=GROUPS,
    )


def config_json(adapter: AdapterConfig) -> str:
    """The `config_dict` of a load: what SGLang requires of a configuration, and nothing that it ignores."""
    return msgspec.json.encode(
        {
            "peft_type": "LORA",
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "target_modules": engine_targets(None, WORDS, modules=adapter.target_modules),
        }
    ).decode()


def _problems(
    facts: EngineFacts, adapter: AdapterConfig, swap: SwapPolicy, receiver: str
) -> Iterator[Problem]:
    arguments = facts.launch_arguments
    if arguments.get("enable_lora") != "true":
        what = "the server was started without LoRA, so there is no layer to hold an adapter"
        fix = "Start it with --enable-lora (weightlane launch-args sglang --mode adapter prints all of it)."
        yield Problem("capability", "enable_lora", what, fix)
        return
    largest = arguments.get("max_lora_rank", "")
    if not largest.isdecimal():
        what = f"{receiver} does not tell the largest rank that it was started for"
        yield Problem("capability", "max_lora_rank", what, "Start it with --max-lora-rank.")
    elif adapter.rank > int(largest):
        what = f"rank {adapter.rank}: {receiver} was launched for {largest} at most"
        yield Problem("peft-config", "r", what, "Launch it with a larger --max-lora-rank.")
    yield from _target_problems(arguments.get("lora_target_modules", ""), adapter, receiver)
    for argument in ("max_loras_per_batch", "max_loaded_loras"):
        slots, needed = arguments.get(argument, ""), SLOTS_NEEDED[swap]
        if slots.isdecimal() and int(slots) < needed:
            option = f"--{argument.replace('_', '-')}"
            what = f"swap {swap} needs {needed} adapters at once, and the server was started for {slots}"
            fix = f"Start it with {option} {needed} or more."
            yield Problem("adapter-swap", argument, what, fix)


def _target_problems(launched_for: str, adapter: AdapterConfig, receiver: str) -> Iterator[Problem]:
    linear: list[str] = []
    for module in adapter.target_modules:
        leaf = module.rpartition(".")[2]
        if leaf in NOT_SHOWN or ".experts." in module or "layers." not in module:
            what = f"LoRA on it is not shown to be bound by {receiver}, which drops some names silently"
            yield Problem("adapter-target", module, what, f"Leave it out of target_modules. {MERGED}")
        else:
            linear.append(module)
    words = launched_for.split()
    if not words:
        what = f"{receiver} does not tell the modules that it was started for"
        yield Problem("capability", "lora_target_modules", what, "Start it with --lora-target-modules.")
        return
    served = served_leaves(item.rpartition(".")[2] for item in linear) if words == ["all"] else None
    yield from unserved_modules(
        linear, served_leaves(words) if served is None else served, packed=PACKED, receiver=receiver
    )


def _incomplete(adapter: AdapterConfig, weights: set[str]) -> bool:
    """Whether a group of modules that the server's checkpoint has is not there as a whole."""
    targets = set(adapter.target_modules)
    for module in adapter.target_modules:
        parent, dot, leaf = module.rpartition(".")
        for group in GROUPS:
            siblings = [f"{parent}{dot}{other}" for other in group] if leaf in group else []
            if any(item not in targets and f"{item}.weight" in weights for item in siblings):
                return True
    return False
