"""A load is traced as a sync would make it, in several calls; and what reaches past the twins is told."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weightlane.trace.coverage import coverage_problems
from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_call, trace_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from weightlane.trace.table import PlacementTable

KEY = TableKey("fake", "1", "Fake")
LAYERS = 8
PIECES = ("q_a", "kv_a")
SOURCES = tuple(
    TracedSource(f"layers.{layer}.{piece}", f"layers.{layer}.{piece}", (2, 4), "float32")
    for layer in range(LAYERS)
    for piece in PIECES
)


class Fused(nn.Module):
    """A packed projection for each layer: the rows of both pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(LAYERS))

    def rows(self, name: str) -> Tensor:
        _, layer, piece = name.split(".")
        first = 2 * PIECES.index(piece)
        return self.fused[int(layer)].data[first : first + 2]

    def one_by_one(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            self.rows(name).copy_(tensor)

    def in_pairs(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        """Written only where both pieces come in this call."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            pieces = held.setdefault(name.rpartition(".")[0], {})
            pieces[name] = tensor
            if len(pieces) == 2:
                self.one_by_one(iter(pieces.items()))

    def zeroes_first(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        """Clears the padding, and with it what a call before has written."""
        for packed in self.fused:
            packed.data.zero_()
        self.one_by_one(pairs)


def problems(*tables: PlacementTable) -> set[str]:
    return {problem.kind for problem in coverage_problems(tables, {}, receiver="it")}


def test_a_loader_that_takes_tensors_one_by_one_is_proven() -> None:
    model = Fused()
    table = trace_load(Receiver(model, model.one_by_one, KEY), SOURCES, style="plain")
    assert problems(table) == set()
    whole = trace_call(Receiver(model, model.one_by_one, KEY), SOURCES, style="plain")
    assert set(table.placements) == set(whole.placements)


@pytest.mark.parametrize("way", ["in_pairs", "zeroes_first"])
def test_a_loader_that_needs_tensors_in_one_call_is_refused(way: str) -> None:
    model = Fused()
    receiver = Receiver(model, getattr(model, way), KEY)
    assert problems(trace_call(receiver, SOURCES, style="plain")) == set()  # one call shows nothing
    table = trace_load(receiver, SOURCES, style="plain")
    assert "trace-per-call" in problems(table) or "trace-overwritten" in problems(table)


def plain_load(model: nn.Module) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        held = dict(model.named_parameters())
        for name, tensor in pairs:
            held[name].data.copy_(tensor)

    return load


def sources_of(model: nn.Module) -> tuple[TracedSource, ...]:
    return tuple(
        TracedSource(name, name, tuple(item.shape), "float32") for name, item in model.named_parameters()
    )


class Counting(OrderedDict[str, Any]):
    """A dictionary of a library's own, as some give to modules."""


def test_modules_with_dictionaries_of_their_own_are_put_back() -> None:
    model = nn.Linear(4, 4)
    model.__dict__["_parameters"] = own = Counting(model._parameters)
    before = {name: (id(item), item.data_ptr()) for name, item in model.named_parameters()}
    assert (
        problems(trace_load(Receiver(model, plain_load(model), KEY), sources_of(model), style="plain"))
        == set()
    )
    assert {name: (id(item), item.data_ptr()) for name, item in model.named_parameters()} == before
    assert model._parameters is own


def wrapping() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (wrapping, "a TwoTensor"),
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]), "torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_no_twin_can_stand_for_is_refused_untouched(make: Callable[[], nn.Module], told: str) -> None:
    model = make()
    called: list[object] = []
    table = trace_load(
        Receiver(model, called.append, KEY), (TracedSource("a", "a", (1,), "float32"),), style="plain"
    )
    assert table.obstacles[0].kind == "untraceable"
    assert told in table.obstacles[0].detail
    assert called == []


@pytest.mark.parametrize("write", ["data", "values"])
def test_a_live_tensor_that_a_loader_held_elsewhere_is_told(write: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    captured, values = model.weight, model.weight.detach().clone()

    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            model.weight.data.copy_(tensor)
        if write == "data":
            captured.data = torch.full((4, 4), 7.0)
        else:
            captured.data.zero_()

    table = trace_load(Receiver(model, load, KEY), sources_of(model), style="plain")
    assert "trace-foreign" in problems(table)
    assert model.weight is captured
    assert torch.equal(model.weight, values)


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda live, given: live.view(torch.bfloat16)[:, :4].copy_(given), "computed"),
        (lambda live, given: live.view(torch.int32).zero_(), "computed"),
        (lambda live, given: live[:1, :1].expand(4, 4).copy_(given), "overwritten"),
    ],
)
def test_memory_seen_otherwise_is_no_placement(write: Callable[[Tensor, Tensor], object], kind: str) -> None:
    model = nn.Linear(4, 4, bias=False)

    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            write(model.weight.data, tensor)

    table = trace_call(Receiver(model, load, KEY), sources_of(model), style="plain")
    assert kind in [item.kind for item in table.obstacles]


def test_a_stand_in_that_outlives_its_trace_raises() -> None:
    model = nn.Linear(4, 4, bias=False)
    kept: list[Tensor] = []

    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            kept.append(tensor)
            model.weight.data.copy_(tensor)

    trace_load(Receiver(model, load, KEY), sources_of(model), style="plain")
    with pytest.raises(RuntimeError, match="kept a tensor of a trace that is over"):
        model.weight.data.copy_(kept[0])


def test_a_fill_through_another_parameter_of_the_same_memory_is_seen() -> None:
    model = nn.Module()
    model.embed = nn.Parameter(torch.randn(4, 4))
    model.head = nn.Parameter(torch.empty(0))
    model.head.data = model.embed.data

    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            model.embed.data.copy_(tensor)
        model.head.data.zero_()

    sources = (TracedSource("embed", "embed", (4, 4), "float32"),)
    assert "uncovered" in problems(trace_call(Receiver(model, load, KEY), sources, style="plain"))
