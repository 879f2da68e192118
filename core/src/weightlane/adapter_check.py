"""What can be wrong with an adapter: at plan time against the receiver's model, and after it was bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from weightlane.adapter_engine import AdapterWorkerEngine
from weightlane.errors import MOST_WITH_NEAR_NAMES, Problem, near_names
from weightlane.peft import parse_lora_name
from weightlane.peft.features import explains, refused_features
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import AdapterBinding, AdapterRef
    from weightlane.messages import ReceivePlan, WireTensor
    from weightlane.peft import AdapterConfig
    from weightlane.receiver import ExpectedTensor

_MOST_NAMED = 8


def check_adapter_tensors(
    tensors: Sequence[WireTensor], config: AdapterConfig, expected: Sequence[ExpectedTensor], *, receiver: str
) -> list[Problem]:
    """Matrices that fit no module of the receiver's checkpoint, and modules that matrices are missing for.

    `expected` holds full shapes, so that one check serves every parallel layout.
    """
    weights = {item.name.removesuffix(".weight"): item for item in expected if item.name.endswith(".weight")}
    problems: list[Problem] = []
    sides: dict[str, set[str]] = {module: set() for module in config.target_modules}
    for tensor in tensors:
        parsed = parse_lora_name(tensor.name)
        if parsed is None and explains(config.features, tensor.name):
            continue
        if parsed is None or parsed.module not in sides:
            what = "it belongs to no target module of the adapter"
            near = near_names(tensor.name, sides) if len(problems) < MOST_WITH_NEAR_NAMES else ()
            problems.append(Problem("adapter-tensor", tensor.name, what, near=near))
            continue
        sides[parsed.module].add(parsed.side)
        weight = weights.get(parsed.module)
        if weight is None or len(weight.shape) != 2:
            continue
        out_features, in_features = weight.shape
        rank = config.lora_of(parsed.module).rank
        wanted = (rank, in_features) if parsed.side == "A" else (out_features, rank)
        if tensor.shape != wanted:
            what = f"its shape is {list(tensor.shape)}; rank {rank} on {receiver} needs {list(wanted)}"
            problems.append(Problem("shape", tensor.name, what))
    for module, found in sides.items():
        weight = weights.get(module)
        if weight is None:
            near = near_names(module, weights) if len(problems) < MOST_WITH_NEAR_NAMES else ()
            what = f"{receiver} has no weight of this module, so that the adapter would bind to nothing there"
            problems.append(Problem("adapter-target", module, what, near=near))
        elif len(weight.shape) != 2:
            what = f"its weight on {receiver} has shape {list(weight.shape)}, which is no linear module's"
            problems.append(Problem("adapter-target", module, what))
        problems += [
            Problem("adapter-tensor", module, f"the plan has no lora_{side} matrix for it")
            for side in ("A", "B")
            if side not in found
        ]
    if not sides:
        problems.append(Problem("adapter-target", config.name, "it has no target modules"))
    return problems


def check_adapter_plan(
    plan: ReceivePlan, expected: Sequence[ExpectedTensor], engine: object, *, receiver: str
) -> list[Problem]:
    """What a receiver checks of the adapter part of a plan before it accepts it, whoever sent it."""
    if (plan.phase is Phase.ADAPTER) != (plan.adapter is not None):
        comes = "with" if plan.adapter else "without"
        what = f"the plan's phase is {plan.phase.value}, and it comes {comes} one"
        return [Problem("adapter-config", "adapter", what, "Report this to whoever made the plan.")]
    if plan.adapter is None:
        return []
    rankless = [module for module, lora in plan.adapter.config.modules.items() if lora.rank < 1]
    if rankless:
        what = f"the plan's adapter gives {_named(rankless)} no rank"
        return [Problem("adapter-config", "adapter", what, "Report this to whoever made the plan.")]
    problems = check_adapter_tensors(plan.tensors, plan.adapter.config, expected, receiver=receiver)
    needs, carries = plan.adapter.config.needs, plan.adapter.expression.carries
    problems += refused_features(needs, carries, receiver=receiver)
    if not isinstance(engine, AdapterWorkerEngine):
        what = f"the worker engine of {plan.backend} has no load_adapter, serve_adapter and remove_adapter"
        problems.append(Problem("capability", plan.backend, what, "Use mode merged or full."))
    return problems


def binding_problems(config: AdapterConfig, ref: AdapterRef, binding: AdapterBinding) -> list[str]:
    """How what an engine bound differs from the adapter: modules, rank, scale and name (invariant 7)."""
    if binding.unread and not binding.modules:
        return [] if binding.ref == ref else [_called_otherwise(binding)]
    bound = {item.module: item for item in binding.modules}
    missing = [module for module in config.target_modules if module not in bound]
    every = len(config.target_modules)
    extra = [module for module in bound if module not in set(config.target_modules)]
    problems: list[str] = []
    if not bound:
        problems.append(f"it bound to none of its {every} modules ({_named(missing)})")
    elif missing:
        problems.append(f"it bound to {every - len(missing)} of {every} modules, not to {_named(missing)}")
    if extra:
        problems.append(f"it also bound to {_named(extra)}")
    told = [(item, config.lora_of(item.module)) for item in binding.modules]
    ranks = [
        f"{item.module} {item.rank}{_not(lora.rank, config)}" for item, lora in told if item.rank != lora.rank
    ]
    if ranks:
        problems.append(f"its rank is {config.rank}, but the engine bound {_named(ranks)}")
    scales = [
        f"{item.module} {item.scaling:g}{_not(lora.scaling, config)}"
        for item, lora in told
        if not math.isclose(item.scaling, lora.scaling, rel_tol=1e-6)
    ]
    if scales:
        problems.append(f"its scale is {config.scaling:g}, but the engine applies {_named(scales)}")
    if binding.ref != ref:
        problems.append(_called_otherwise(binding))
    return problems


def _called_otherwise(binding: AdapterBinding) -> str:
    return f"the engine calls it {binding.ref.name} of version {binding.ref.version}"


def _not(wanted: float, config: AdapterConfig) -> str:
    """Where modules differ, what each was to have."""
    return f" (not {wanted:g})" if config.own else ""


def _named(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_MOST_NAMED])
    return shown if len(items) <= _MOST_NAMED else f"{shown} and {len(items) - _MOST_NAMED} more"
