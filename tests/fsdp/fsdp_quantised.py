"""QLoRA under every wrapper: refused by name, and never taken for the weights that its bytes stand for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from fsdp_wrappers import WRAPPERS
from peft_wrappers import lora
from rank_export import lane_of
from torch import nn

from weightlane.errors import ExportError
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeLinear4bit(nn.Linear):
    """As FSDP takes a base of bitsandbytes: packed bytes that pose as floating ones, known by their class."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        packed = torch.zeros(plain.weight.numel() // 8, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.quant_state = object()


def quantised(model: nn.Module) -> nn.Module:
    """QLoRA: peft answers a quantised layer with a class of its own."""
    wrapped = lora(model, target_modules=["q_proj"])
    for layer in list(wrapped.modules()):
        if hasattr(layer, "lora_A"):
            base: Any = layer.base_layer
            layer.base_layer = FakeLinear4bit(base)
            layer.__class__ = type("Linear4bit", (type(layer),), {"__module__": "peft.tuners.lora.bnb"})
    return wrapped


def a_quantised_base_is_refused(wrapper: str, phase: Phase) -> None:
    """By name, on every rank, before the first collective; the module's class is told, not FSDP's."""
    wrapped = WRAPPERS[wrapper](quantised(tiny_models.dense()))
    told = r"layers\.0\.self_attn\.q_proj is quantised: FakeLinear4bit \(.*bitsandbytes\)\..*dequantise it"
    with pytest.raises(ExportError, match=told):
        lane_of(wrapped, phase)


QUANTISED: dict[str, Callable[[], None]] = {
    f"a quantised base / {name} / {phase.value}": partial(a_quantised_base_is_refused, name, phase)
    for name in ("ddp", "fsdp1", "fsdp2")
    for phase in (Phase.MERGED, Phase.BASE, Phase.ADAPTER)
}
