"""What an `Engine` tells of itself, in the words in which a server does (`/server_info`, `/model_info`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from weightlane_sglang.contract import LAUNCH_ARGUMENTS_READ

_SERVER_FIELDS = ("tp_size", "pp_size", "dp_size", "device", "quantization", "random_seed")


def server_info(manager: Any, version: str) -> dict[str, Any]:
    """The arguments that a plan depends on, as SGLang has resolved them, and how long its start took.

    `manager` is the engine's `TokenizerManager`. Since 0.5.21 what was resolved lies beside the arguments.
    """
    arguments = manager.server_args
    if hasattr(arguments, "resolved_dict"):
        resolved: dict[str, Any] = arguments.resolved_dict()
    else:
        resolved = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    read = {name: resolved[name] for name in (*_SERVER_FIELDS, *LAUNCH_ARGUMENTS_READ) if name in resolved}
    return {**read, "version": version, "startup_time": getattr(manager, "startup_time", None)}


def model_info(manager: Any) -> dict[str, Any]:
    """The model that is served now, and the weight version: in older ones it lies in the arguments."""
    config = manager.model_config
    if hasattr(manager, "config_value"):
        weight_version = manager.config_value("weight_version")
    else:
        weight_version = manager.server_args.weight_version
    return {
        "model_path": manager.model_path,
        "weight_version": weight_version,
        "architectures": getattr(config.hf_config, "architectures", None),
        "has_image_understanding": getattr(config, "is_image_understandable_model", None),
        "has_audio_understanding": getattr(config, "is_audio_understandable_model", None),
    }


def loaded_models(manager: Any) -> dict[str, Any]:
    """The served model, and each adapter that is loaded with that model for its parent."""
    served = manager.served_model_name
    cards = [{"id": served}]
    if manager.server_args.enable_lora:
        loaded = manager.lora_registry.get_all_adapters().values()
        cards += [{"id": item.lora_name, "parent": served} for item in loaded]
    return {"data": cards}
