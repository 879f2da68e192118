"""The cases of two ranks with adapters, which every peft has to pass."""

from __future__ import annotations

from case_running import run
from fsdp_cases import MODELS, adapter_cases
from fsdp_wrappers import WRAPPERS
from peft_wrappers import ADAPTED, FUSED

SHARDING = ("fsdp1", "fsdp1 flat", "fsdp2")
"""Under these every kind of adapter and model; plain LoRA under the others too."""

OTHERS = ("plain", "ddp", "fsdp1 offload", "fsdp2 offload", "fsdp2 by columns", "fsdp2 layers only")

CASES = {
    **adapter_cases(
        {name: WRAPPERS[name] for name in SHARDING},
        {name: MODELS[name] for name in ("dense", "tied")},
        ADAPTED,
    ),
    **adapter_cases(
        {name: WRAPPERS[name] for name in SHARDING},
        {name: MODELS[name] for name in ("experts", "buffers")},
        FUSED,
    ),
    **adapter_cases(
        {name: WRAPPERS[name] for name in OTHERS}, {"dense": MODELS["dense"]}, {"lora": ADAPTED["lora"]}
    ),
}

if __name__ == "__main__":
    run(CASES)
