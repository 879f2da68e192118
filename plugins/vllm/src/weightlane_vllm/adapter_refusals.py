"""What stands against an adapter in one worker, found before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import MOST_WITH_NEAR_NAMES, Problem, near_names
from weightlane.probes import NotViable
from weightlane_vllm.adapter_supply import probe_adapter_supply
from weightlane_vllm.facts import LORA_PATTERNS
from weightlane_vllm.lora_layers import LoraLayers
from weightlane_vllm.lora_rank import rank_problems

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.adapters import AdapterPlan, TrainedBase
    from weightlane.facts import EngineFacts
    from weightlane.peft import AdapterConfig

LORA_OFF = Problem(
    "capability",
    "enable_lora",
    "the engine was started without LoRA, so there is no layer to hold an adapter",
    "Start it with --enable-lora (weightlane launch-args vllm --mode adapter prints all of it).",
)


def launch_problems(config: AdapterConfig, facts: EngineFacts, *, receiver: str) -> list[Problem]:
    """What an engine's launch arguments refuse of an adapter, whatever its slots."""
    arguments = facts.launch_arguments
    if arguments.get("enable_lora") != "true":
        return [LORA_OFF]
    problems = rank_problems(config, int(arguments["max_lora_rank"]), receiver=receiver)
    if arguments.get("fully_sharded_loras") == "true":
        what = "it shards both matrices of each pair, which this plugin has not been shown to prove bound"
        problems.append(
            Problem("capability", "fully_sharded_loras", what, "Start it without --fully-sharded-loras.")
        )
    return problems


def adapter_problems(worker: Any, plan: AdapterPlan, facts: EngineFacts, *, receiver: str) -> list[Problem]:
    """Everything that this worker refuses of an adapter: launch, patterns, base, modules without a layer.

    A module that vLLM has no wrapped layer for would be skipped by it without a word.
    """
    problems = launch_problems(plan.config, facts, receiver=receiver)
    if LORA_OFF in problems:
        return problems
    problems += _base_problems(plan.base, receiver)
    if plan.config.own and not facts.attributes.get(LORA_PATTERNS):
        what = f"modules have ranks or scales of their own, and {receiver} ignores those"
        fix = "Report this: it was to travel in normal form."
        problems.append(Problem("peft-config", "rank_pattern", what, fix))
    layers = LoraLayers(worker)
    supply = probe_adapter_supply(layers.manager)
    if isinstance(supply, NotViable):
        problems.append(
            Problem("capability", "adapter", supply.reason, "Use a version that this plugin was tested with.")
        )
    return problems + _without_layer(plan.config, layers, receiver)


def _base_problems(base: TrainedBase, receiver: str) -> list[Problem]:
    if base.sent_by:
        return []
    what = f"{receiver} holds it in fused tensors, which are not compared with the trainer's values here"
    fix = "Use a trainer that can send the base, or mode merged or full."
    return [Problem("residency", "base", what, fix)]


def _without_layer(config: AdapterConfig, layers: LoraLayers, receiver: str) -> list[Problem]:
    sites: Mapping[str, object] = layers.sites()
    problems: list[Problem] = []
    for module in config.target_modules:
        name = layers.receiver_name(module)
        if name not in sites:
            near = near_names(name, sites) if len(problems) < MOST_WITH_NEAR_NAMES else ()
            what = f"{receiver} has no layer that takes LoRA for it (looked for {name})"
            fix = "Leave it out of target_modules, or start the engine without --lora-target-modules."
            problems.append(Problem("adapter-target", module, what, fix, near=near))
    return problems
