"""The adapter of a peft-wrapped module: its matrices, its configuration, and the base that stays behind.

Read from the live module alone; peft itself is not imported. Names are canonical ones (`weightlane.peft`):
the adapter's own name is taken out of them, and `base_model.model.` stands before them also where the layers
were put into a model without the wrapper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from weightlane.errors import ExportError, near_names
from weightlane.export.lora_layers import require_plain_base as require_no_packing
from weightlane.export.paths import walk
from weightlane.export.places import PeftLayer, adapter_configs, is_layer
from weightlane.peft import adapter_config_of
from weightlane.torch_trainer.exported import of_phase
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from weightlane.contexts import ExportContext, PeftConfigContext
    from weightlane.peft import AdapterConfig


def adapter_tensors(export: ExportContext) -> dict[str, Tensor]:
    """The live matrices of the exported adapter under canonical names, without a copy.

    Raises:
        ExportError: the module holds no such adapter, or has it merged into its base now, or trains its base:
            then the matrices alone are not what the trainer computes with.
    """
    if export.model is None:
        return {}
    name = adapter_name(export)
    require_plain_base(export.model)
    found = of_phase(export.model, Phase.ADAPTER, name)
    return {each: found.made(each) for each in found.recipes}


def base_tensors(export: ExportContext) -> dict[str, Tensor]:
    """The base under checkpoint names, live or views of it: what an adapter means something on.

    Raises:
        ExportError: an adapter is merged into it, it is trained, or it is quantised.
    """
    if export.model is None:
        return {}
    adapter_name(export)
    require_plain_base(export.model)
    found = of_phase(export.model, Phase.BASE)
    return {name: found.made(name) for name in found.recipes}


def adapter_config(context: PeftConfigContext) -> AdapterConfig:
    """The exported adapter's configuration, checked against the scales that the layers really apply.

    Raises:
        PlanError: features that an adapter cannot carry.
        ExportError: a layer applies another scale than the configuration says.
    """
    name = adapter_name(context.export)
    config = adapter_config_of(
        _configurations(context.export.model)[name], name=name, tensors=context.tensors
    )
    require_scales(context.export.model, config)
    return config


def require_scales(model: Any, config: AdapterConfig) -> None:
    """Raises ExportError when a layer applies the adapter with another scale than `config` has for it."""
    name = config.name
    for path, layer in _layers(model, name):
        applied, told = float(layer.scaling[name]), config.lora_at(path).scaling
        if not math.isclose(applied, told, rel_tol=1e-6):
            raise ExportError(
                f"{path} applies adapter {name} with scale {applied:g}; its configuration says {told:g}.",
                "What the configuration says travels, so the engine would apply another than the trainer.",
                "Set the layer's scale back, or use mode merged.",
            )


def adapter_name(export: ExportContext) -> str:
    """Which adapter is exported: the one that was named, or the only one.

    Raises:
        ExportError: the model has none, not the named one, or several and none was named.
    """
    known = _configurations(export.model)
    wanted = export.options.get("adapter")
    if not known:
        raise ExportError(
            f"A trainer model of type {type(export.model).__name__} has no adapter.",
            "Mode adapter sends the LoRA matrices of a module that peft has wrapped.",
            "Wrap it with peft.get_peft_model, or use mode full.",
        )
    if wanted is None and len(known) > 1:
        raise ExportError(
            f"The model has {len(known)} adapters: {', '.join(known)}.",
            "Which one is the policy cannot be told.",
            "Name it: wl.trainer('torch', model=..., adapter=...).",
        )
    name = next(iter(known)) if wanted is None else str(wanted)
    if name not in known:
        near = near_names(name, known)
        raise ExportError(
            f"The model has no adapter {name!r}.",
            f"It has {', '.join(known)}.",
            f"Use {near[0]!r}." if near else "Name one of these.",
        )
    return name


def _configurations(model: Any) -> Mapping[str, Any]:
    return adapter_configs(model) if hasattr(model, "named_modules") else {}


def _layers(model: Any, name: str) -> list[tuple[str, Any]]:
    """The layers that hold the adapter, by path; peft calls the matrices `lora_A` in each."""
    return [
        (path, module)
        for path, module in walk(model)
        if name in getattr(module, "lora_A", {}) and name in getattr(module, "scaling", {})
    ]


def require_plain_base(model: Any) -> None:
    """Raises ExportError when the base is quantised, merged with any adapter now, or trained."""
    for path, layer in walk(model):
        if not is_layer(layer):
            continue
        require_no_packing(PeftLayer(path, layer))
        merged = list(getattr(layer, "merged_adapters", ()))
        if merged:
            raise ExportError(
                f"{path} has adapter {merged[0]} merged into its base weight now.",
                "The engine's base has not, and would get other weights than the trainer computes with.",
                "Call unmerge_adapter() before a sync.",
            )
    trained = [
        key
        for key, parameter in model.named_parameters()
        if parameter.requires_grad and not any(part.startswith("lora_") for part in key.split("."))
    ]
    if trained:
        raise ExportError(
            f"{trained[0]} and {len(trained) - 1} more parameters of the base are trained.",
            "Mode adapter sends the LoRA matrices alone, so the engine would keep the old ones for ever.",
            "Freeze them (requires_grad=False), or use mode merged.",
        )
