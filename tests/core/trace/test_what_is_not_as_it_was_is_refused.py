"""What a load changes beside the elements that it places, and what it places by, makes a table untrue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from weightlane.trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    Trace = Callable[..., Any]  # of conftest.Traced
    Weights = dict[str, Tensor]

A = torch.arange(16.0).reshape(4, 4)


class Live(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("order", torch.arange(4))
        self.more = [nn.Parameter(torch.zeros(4, 4))]


def _transposed(param: Tensor, weight: Tensor) -> None:
    param.data = param.data.t()
    param.data.copy_(weight)


def _flat(param: Tensor, weight: Tensor) -> None:
    param.data = param.data.view(-1)
    param.data.copy_(weight.reshape(-1))


REFORMED = {"transposed": _transposed, "flat": _flat}


@pytest.mark.parametrize("name", REFORMED)
def test_a_parameter_that_has_another_form_after_the_load_is_rebound(trace: Trace, name: str) -> None:
    def load(live: Any, weights: Weights) -> None:
        REFORMED[name](live.w, weights["a"])
        REFORMED[name](live.more[0], weights["b"])

    made = trace(Live(), load, {"a": A, "b": A})
    assert [(item.kind, item.targets) for item in made.table.obstacles] == [
        ("rebound", ("w",)),
        ("rebound", ("more[0]",)),
    ]
    model = Live()
    load(model, {"a": A, "b": A})  # the element that the table of such a load would be untrue of
    assert model.w.stride() == (1, 4) if name == "transposed" else model.w.shape == (16,)


def test_a_form_that_a_parameter_has_for_a_while_is_no_obstacle(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        _transposed(live.w, weights["a"])
        live.w.data = live.w.data.t()
        live.more[0].data.copy_(weights["b"])

    made = trace(Live(), load, {"a": A, "b": A}, owned=lambda name, _: "own" if name == "order" else "")
    assert made.proven()


def test_bits_taken_for_another_dtype_are_no_placement(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(torch.ops.aten.view_copy.dtype(weights["a"], torch.int64))

    made = trace(Live(), load, {"a": A.double()})
    assert (made.kinds, made.operators) == (["computed"], ["aten.view_copy"])


def test_a_constant_that_was_written_to_past_torch_is_none(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        padding = torch.zeros(4)
        padding.numpy()[:] = 7
        live.w.data[3:].copy_(padding)
        live.w.data[:3].copy_(weights["a"][:3])

    assert trace(Live(), load, {"a": A}).kinds == ["computed"]


def _by_index(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"][live.order])


def _by_list(live: Any, weights: Weights) -> None:
    for row, place in enumerate(live.order.tolist()):
        live.w.data[place].copy_(weights["a"][row])


@pytest.mark.parametrize("write", [_by_index, _by_list])
@pytest.mark.parametrize("order_first", [True, False])
def test_elements_that_go_by_an_order_that_comes_too_are_refused(
    trace: Trace, write: Callable[[Any, Weights], None], order_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(live: Any, weights: Weights) -> None:
        if order_first:
            live.order.copy_(weights["order"])
        write(live, weights)
        if not order_first:
            live.order.copy_(weights["order"])

    sources = {"order": torch.arange(4), "a": A}
    made = trace(Live(), load, sources)
    assert (made.kinds, made.table.obstacles[0].sources) == (["value-dependent"], ("order",))
    monkeypatch.setattr(tracing, "placed", lambda _: None)  # as if nobody compared
    assert trace(Live(), load, sources).kinds == []


def test_an_order_of_the_engine_s_own_and_one_that_nothing_goes_by_are_no_obstacle(trace: Trace) -> None:
    def by_its_own(live: Any, weights: Weights) -> None:
        _by_index(live, weights)

    def beside(live: Any, weights: Weights) -> None:
        live.order.copy_(weights["order"])
        live.w.data.copy_(weights["a"])

    assert trace(Live(), by_its_own, {"a": A}).kinds == []
    assert trace(Live(), beside, {"a": A, "order": torch.arange(4)}).kinds == []
