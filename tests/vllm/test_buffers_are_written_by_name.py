"""Buffers beside the loader: routed, checked before the first is written, looked up at each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from weightlane.errors import EngineError
from weightlane_vllm.buffers import BufferWrites, write_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class FakeModel(nn.Module):
    """A loader that takes parameters alone, as many of vLLM's do, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("scale", torch.zeros(2))
        self.calls: list[list[str]] = []

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        self.calls.append([*given])
        for name, parameter in self.named_parameters():
            if name in given:
                parameter.copy_(given[name])


ROUTES = {"router.bias": "bias", "router.scale": "scale"}
SENT = [("router.bias", torch.ones(2)), ("weight", torch.ones(2))]


def test_the_loader_gets_the_rest_and_no_call_without_any() -> None:
    model = FakeModel()
    BufferWrites(model, ROUTES).load(iter(SENT))
    assert model.calls == [["weight"]]
    assert torch.equal(model.get_buffer("bias"), torch.ones(2))
    BufferWrites(model, ROUTES).load(iter(SENT[:1]))
    assert model.calls == [["weight"]]


def test_without_a_route_the_old_value_stays() -> None:
    model = FakeModel()
    BufferWrites(model, {}).load(iter(SENT))
    assert model.calls == [["router.bias", "weight"]]
    assert torch.equal(model.get_buffer("bias"), torch.zeros(2)), "what a route is for"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (torch.ones(1), ("has shape [2]", "has [1]")),
        (torch.ones(2, dtype=torch.int32), ("torch.float32", "torch.int32")),
    ],
)
def test_all_are_checked_before_one_is_written(wrong: Tensor, told: tuple[str, str]) -> None:
    model = FakeModel()
    with pytest.raises(EngineError) as error:
        write_buffers(model, ROUTES, [SENT[0], ("router.scale", wrong)])
    assert "scale" in str(error.value)
    assert all(words in str(error.value) for words in told)
    assert torch.equal(model.get_buffer("bias"), torch.zeros(2))


def test_another_floating_dtype_is_turned_into_the_buffers() -> None:
    model = FakeModel()
    write_buffers(model, ROUTES, [("router.bias", torch.full((2,), 1.5, dtype=torch.bfloat16))])
    assert model.get_buffer("bias").dtype == torch.float32
    assert torch.equal(model.get_buffer("bias"), torch.full((2,), 1.5))


def test_a_buffer_that_was_put_in_its_place_since_is_written() -> None:
    model = FakeModel()
    writes = BufferWrites(model, ROUTES)
    before = model.get_buffer("bias")
    model.register_buffer("bias", torch.zeros(2))
    writes.load(iter(SENT))
    assert torch.equal(model.get_buffer("bias"), torch.ones(2))
    assert torch.equal(before, torch.zeros(2))
    del model.bias
    with pytest.raises(EngineError, match="has no buffer bias"):
        writes.load(iter(SENT))
