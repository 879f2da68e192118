"""The adapter schema: any LoRA configuration, read once at the edge, to frozen types.

`LoraDeclaration` is what a configuration says, `AdapterConfig` what an adapter is once its tensors are known:
the modules really there, each with its rank and scale. Names of adapter tensors are those of peft's own
checkpoint file. The library itself is never imported here.
"""

from weightlane.peft.config import AdapterConfig, ModuleLora, adapter_of_modules, peft_json
from weightlane.peft.declared import LoraDeclaration, declared_lora
from weightlane.peft.names import WRAPPER_PREFIX, LoraName, lora_name, parse_lora_name
from weightlane.peft.with_tensors import adapter_config_of

__all__ = [
    "WRAPPER_PREFIX",
    "AdapterConfig",
    "LoraDeclaration",
    "LoraName",
    "ModuleLora",
    "adapter_config_of",
    "adapter_of_modules",
    "declared_lora",
    "lora_name",
    "parse_lora_name",
    "peft_json",
]
