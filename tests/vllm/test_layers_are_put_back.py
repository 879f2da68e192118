"""A layer that waits for its weights gets back the tensors that it had, whatever the engine noted of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightlane_vllm.layerwise_reload import _put_back


@pytest.mark.parametrize(
    ("noted", "persistent"),
    [
        pytest.param({"kernel_non_persistent_buffers": {"scratch"}}, ["kept"], id="since 0.27"),
        pytest.param({}, ["kept", "scratch"], id="before, as the engine's own reloads leave it"),
    ],
)
def test_the_tensors_themselves_come_back(noted: dict[str, Any], persistent: list[str]) -> None:
    weight = nn.Parameter(torch.ones(2))
    buffers = {"kept": torch.ones(1), "scratch": torch.zeros(1)}
    layer = nn.Module()
    layer.register_parameter("weight", nn.Parameter(torch.empty(2, device="meta")))
    layer.register_parameter("absent", None)
    layer.register_buffer("kept", torch.empty(1, device="meta"))
    _put_back(layer, SimpleNamespace(kernel_tensors=({"weight": weight}, buffers), **noted))
    assert layer.weight is weight
    assert all(layer.get_buffer(name) is buffer for name, buffer in buffers.items())
    assert [name for name in layer.state_dict() if name != "weight"] == persistent
