"""vLLM's `LoRAModel` made of tensors in memory, by whatever parameters the installed class has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import EngineError

if TYPE_CHECKING:
    from weightlane.adapter_engine import AdapterLoad
    from weightlane_vllm.lora_layers import LoraLayers

_NEEDED = ("lora_model_id", "tensors", "peft_helper", "dtype")
"""Without these it cannot be told which adapter to make."""


def lora_model(load: AdapterLoad, number: int, layers: LoraLayers) -> Any:
    """A new `LoRAModel`; its tensors are copies, since vLLM multiplies `lora_b` by the scale in place.

    Raises:
        EngineError: the installed class requires something that nobody here knows.
        ValueError: vLLM's own validation refuses the configuration.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(msgspec.json.decode(load.wire))
    helper.validate_legal(layers.config)
    known: dict[str, Any] = {
        "lora_model_id": number,
        "tensors": {name: tensor.detach().to("cpu", copy=True) for name, tensor in load.tensors.items()},
        "peft_helper": helper,
        "device": "cpu",
        "dtype": layers.config.lora_dtype,
        "model_vocab_size": layers.manager.vocab_size,
        "weights_mapper": layers.renames(),
        "skip_prefixes": layers.skipped_prefixes(),
    }
    return LoRAModel.from_lora_tensors(**arguments_for(LoRAModel.from_lora_tensors, known))


def arguments_for(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Those of `known` that `function` has parameters for.

    Raises:
        EngineError: it requires a parameter that is not among them, or lacks one that must be told.
    """
    parameters = inspect.signature(function).parameters
    unknown = [
        name
        for name, item in parameters.items()
        if name not in known and item.default is inspect.Parameter.empty
    ]
    lacking = [name for name in _NEEDED if name not in parameters]
    if known.get("weights_mapper") is not None and "weights_mapper" not in parameters:
        lacking.append("weights_mapper")
    if unknown or lacking:
        told = [f"requires {', '.join(unknown)}"] if unknown else []
        told += [f"has no {', '.join(lacking)}"] if lacking else []
        raise EngineError(
            f"{function.__qualname__} of this vLLM {' and '.join(told)}.",
            "This plugin makes adapters in memory with it, and was written for vLLM 0.23 to 0.32.",
            "Use one of these, or a newer plugin.",
        )
    return {name: value for name, value in known.items() if name in parameters}
