"""A layer that waits for its weights gets back the tensors that it had, whatever the engine noted of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightlane_vllm.layerwise_reload import _put_back, keep_scratch, note_scratch


@pytest.mark.parametrize(
    ("noted", "persistent"),
    [
        pytest.param({"kernel_non_persistent_buffers": {"scratch"}}, ["kept"], id="since 0.27"),
        pytest.param({}, ["kept", "scratch"], id="before, as vLLM's own reloads leave it"),
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


def test_what_was_no_part_of_the_checkpoint_is_none_after_a_reload_that_forgot_it() -> None:
    layer = nn.Module()
    layer.register_buffer("kept", torch.zeros(1))
    layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    layer.register_buffer("dropped", torch.zeros(1), persistent=False)
    note_scratch(layer)
    delattr(layer, "scratch")
    delattr(layer, "dropped")
    layer.register_buffer("scratch", torch.zeros(1))  # as vLLM before 0.27 puts it back
    assert list(layer.state_dict()) == ["kept", "scratch"], "else there is nothing to repair"
    note_scratch(layer)
    keep_scratch(layer)
    assert list(layer.state_dict()) == ["kept"]
    assert layer._non_persistent_buffers_set == {"scratch"}
