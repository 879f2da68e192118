"""QLoRA: an adapter on packed numbers is refused in every mode, with the module, its class and the way out.

The quantiser is a stand-in that is told by the same marks as bitsandbytes, whose class peft also answers with
a layer of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import export_of, llama, made, same, wrapped
from torch import nn

from weightlane.errors import ExportError
from weightlane.export import lora_layers
from weightlane.torch_trainer.describe import describe
from weightlane.types import Phase

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 2**-5
TOLD = (
    r"base of base_model\.model\.model\.layers\.0\.self_attn\.q_proj is quantised: FakeLinear4bit "
    r"\(.*bitsandbytes\)\..*Load the base in bfloat16, or dequantise it \(model\.dequantize\(\)"
)


class FakeLinear4bit(nn.Linear):
    """Two numbers of four bits in each byte; the bytes pose as floating ones, as they do for FSDP."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        numbers = (plain.weight.detach() / SCALE).round().clamp(-8, 7).to(torch.int8) + 8
        pairs = numbers.view(-1, 2).to(torch.uint8)
        packed = (pairs[:, 0] * 16 + pairs[:, 1]).view(torch.float32).view(-1, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.quant_state = object()

    def dequantised(self) -> nn.Linear:
        packed = self.weight.detach().view(torch.uint8).flatten()
        numbers = torch.stack([packed // 16, packed % 16], dim=1).to(torch.float32) - 8
        plain = nn.Linear(self.in_features, self.out_features, bias=False)
        plain.weight = nn.Parameter((numbers * SCALE).view(plain.weight.shape), requires_grad=False)
        return plain

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        found: Tensor = self.dequantised()(input)
        return found


def quantised() -> Any:
    model = wrapped(llama(), target_modules=["q_proj"])
    layer = first_layer(model)
    layer.base_layer = FakeLinear4bit(layer.base_layer)
    layer.__class__ = type("Linear4bit", (type(layer),), {"__module__": "peft.tuners.lora.bnb"})
    return model


def first_layer(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("phase", [Phase.MERGED, Phase.BASE, Phase.ADAPTER])
def test_the_refusal_names_the_module_its_class_and_what_to_do(phase: Phase) -> None:
    with pytest.raises(ExportError, match=TOLD):
        describe(export_of(quantised(), phase))


def test_dequantised_as_the_refusal_says_each_mode_serves_it() -> None:
    model = quantised()
    layer = first_layer(model)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    layer.base_layer = layer.base_layer.dequantised()
    layer.__class__ = type(layer).__mro__[1]
    for phase in (Phase.MERGED, Phase.BASE, Phase.ADAPTER):
        assert describe(export_of(model, phase)).tensors
    engine = llama()
    engine.load_state_dict(made(model, Phase.MERGED))
    with torch.no_grad():
        torch.testing.assert_close(engine(input_ids=tokens).logits, before, rtol=0, atol=1e-5)


def test_control_where_nobody_looks_the_packed_bytes_are_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a floating dtype, so that nothing else would notice before an engine did."""
    monkeypatch.setattr(lora_layers, "require_plain_base", lambda layer: None)
    monkeypatch.setattr("weightlane.export.merging.require_plain_base", lambda layer: None)
    model = quantised()
    name = "model.layers.0.self_attn.q_proj.weight"
    sent = made(model, Phase.BASE)[name]
    assert sent.dtype == torch.float32
    assert same({name: sent}, {name: first_layer(model).base_layer.weight.detach()})
