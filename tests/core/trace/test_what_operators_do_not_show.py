"""Ways past the operators: a look at a device, at a value in C, twins that are kept, numpy, shared memory."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_call

if TYPE_CHECKING:
    from collections.abc import Callable

    Trace = Callable[..., Any]  # of conftest.Traced
    Weights = dict[str, Tensor]

A, ONE = torch.empty(4, 6), torch.empty(())


class Live(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("places", torch.arange(4))


ASKS: dict[str, Callable[[Tensor], bool]] = {
    "is_meta": lambda param: param.is_meta,
    "view's is_meta": lambda param: param.data[1:].is_meta,
    "device": lambda param: param.device == torch.device("meta"),
    "device type": lambda param: param.data.device.type == "meta",
    "is_cpu": lambda param: not param.is_cpu,
    "is_cuda": lambda param: param.is_cuda,
}


@pytest.mark.parametrize("built", ["live", "on meta"])
@pytest.mark.parametrize("name", ASKS)
def test_a_loader_that_asks_where_a_parameter_lies_goes_the_way_of_a_real_load(
    trace: Trace, name: str, built: str
) -> None:
    def load(live: Any, weights: Weights) -> None:
        if ASKS[name](live.w):
            return  # such as: it is filled in later
        live.w.data.copy_(weights["a"].to(live.w.device))

    if built == "live":
        assert trace(Live(), load, {"a": A}).problems == ["uncovered"]  # the buffer, which nothing writes
        return
    with torch.device("meta"):
        model = Live()
    receiver = Receiver(model, lambda pairs: load(model, dict(pairs)), TableKey("reference", "1", "Tiny"))
    table = trace_call(receiver, [TracedSource("a", "a", (4, 6), "float32")], style="plain")
    assert [item.elements for item in table.placements] == [24]
    assert model.w.is_meta  # and to everybody else the truth is told, during a trace and after


def test_nothing_of_it_stays_on_torchs_class(trace: Trace) -> None:
    before = dict(torch.Tensor.__dict__)
    trace(Live(), lambda live, weights: live.w.data.copy_(weights["a"]), {"a": A})
    assert dict(torch.Tensor.__dict__) == before


LOOKS: dict[str, Callable[[float], Any]] = {
    "isnan": math.isnan,
    "isinf": math.isinf,
    "isfinite": math.isfinite,
    "sign": lambda value: math.copysign(1.0, value) < 0,
    "numpy": np.isnan,
    "compared by sqrt": lambda value: math.sqrt(abs(np.float64(value))) < 3,
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_value_in_c_is_a_decision(trace: Trace, name: str) -> None:
    def load(live: Any, weights: Weights) -> None:
        value = weights["one"].item()
        live.w.data.copy_(weights["a"])
        if LOOKS[name](value):
            live.w.data[1].copy_(weights["a"][2])
        live.w.data[0, 0].fill_(value)

    made = trace(Live(), load, {"a": A, "one": ONE})
    assert "value-dependent" in made.kinds
    assert made.table.obstacles[0].sources == ("one",)


@pytest.mark.parametrize("compute", [math.fabs, math.sqrt, math.log, np.negative, float.__abs__])
def test_a_value_calculated_in_c_is_no_placement(trace: Trace, compute: Callable[[float], float]) -> None:
    def load(live: Any, weights: Weights) -> None:
        value = weights["one"].item()
        live.w.data.copy_(weights["a"])
        live.places.fill_(0)
        live.w.data[0, 0].fill_(float(compute(value)))
        live.w.data[0, 0].fill_(value)

    assert trace(Live(), load, {"a": A, "one": ONE}).kinds != []


def test_a_value_that_is_only_written_is_a_placement(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        first, second = weights["one"].item(), weights["two"].item()
        live.w.data[1:].copy_(weights["a"][1:])
        live.w.data[0].fill_(first)
        live.w.data[0, 3:].fill_(second)
        live.places.fill_(0)

    made = trace(Live(), load, {"a": A, "one": ONE, "two": ONE})
    assert made.kinds == []
    assert {item.source for item in made.table.placements} == {0, 1, 2}


def test_a_loader_that_keeps_what_stood_for_a_parameter_is_refused(trace: Trace) -> None:
    model = Live()

    @functools.lru_cache
    def held(name: str) -> Tensor:
        return dict(model.named_parameters())[name]

    def load(live: Any, weights: Weights) -> None:
        held("w").data.copy_(weights["a"])

    first = trace(model, load, {"a": A})
    assert [(item.kind, item.targets) for item in first.table.obstacles] == [("foreign", ("w",))]
    assert "trace-foreign" in first.problems
    second = trace(model, load, {"a": A})  # as it would be found without looking: by a load that is lost
    assert second.table.placements == ()
    assert second.kinds == ["foreign"]


def test_a_cache_that_the_module_holds_is_emptied_and_no_obstacle(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        if not hasattr(live, "cached"):
            live.cached = dict(live.named_parameters())
        live.cached["w"].data.copy_(weights["a"])

    model = Live()
    assert [trace(model, load, {"a": A}).kinds for _ in range(2)] == [[], []]


def test_a_constant_written_through_numpy_is_refused(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(weights["a"])
        live.places.numpy()[:] = 7

    made = trace(Live(), load, {"a": A})
    assert [(item.kind, item.targets) for item in made.table.obstacles] == [("computed", ("places",))]
    assert "trace-computed" in made.problems


def test_a_constant_made_by_numpy_is_refused(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(torch.from_numpy(np.ones((4, 6), dtype=np.float32)))

    made = trace(Live(), load, {"a": A})
    assert (made.kinds, made.operators) == (["computed"], ["aten.copy_"])


class Shared(nn.Module):
    """Two parameters in one memory; `apart` leaves no byte to both."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        memory = torch.zeros(48)
        self.w = nn.Parameter(memory[:24].view(4, 6))
        self.bits = nn.Parameter(memory[24 if apart else 23 :].view(torch.int32)[:24], requires_grad=False)


@pytest.mark.parametrize(("apart", "kinds"), [(True, []), (False, ["overwritten"])])
def test_two_dtypes_over_one_memory_are_refused_when_both_are_written(
    trace: Trace, apart: bool, kinds: list[str]
) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(weights["a"])
        live.bits.data.copy_(weights["bits"])

    made = trace(Shared(apart=apart), load, {"a": A, "bits": torch.empty(24, dtype=torch.int32)})
    assert made.kinds == kinds
    if kinds:
        assert made.table.obstacles[0].sources == ("a", "bits")
        assert made.table.obstacles[0].detail == "bits lies in its memory as int32"
