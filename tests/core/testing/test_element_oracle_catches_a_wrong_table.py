"""The oracle agrees with a true table and names the tensor of a false one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from torch import nn

from weightlane.testing.element_oracle import compare_with_oracle
from weightlane.trace.table import Fill, PlacementTable, TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Packed(nn.Module):
    """gate and up in one weight, four rows of padding, and a norm in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(28, 40).to(dtype))
        self.norm = nn.Parameter(torch.randn(40).bfloat16())

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                self.packed.data.narrow(0, 12 * (name == "up"), 12).copy_(tensor.t())
        self.packed.data[24:].fill_(0)


SOURCES = (
    TracedSource("gate", "gate", (40, 12), "float32"),
    TracedSource("up", "up", (40, 12), "float32"),
    TracedSource("norm", "norm", (40,), "float32"),
)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def receiver(request: pytest.FixtureRequest) -> Receiver:
    model = Packed(request.param)
    return Receiver(model, model.load_weights, TableKey("reference", "1", "Packed"))


def table_of(receiver: Receiver) -> PlacementTable:
    return trace_load(receiver, SOURCES, style="plain")


def test_a_true_table_has_no_differences_and_the_live_model_is_not_touched(receiver: Receiver) -> None:
    before = {name: (id(item), item.detach().clone()) for name, item in receiver.model.named_parameters()}
    assert compare_with_oracle(receiver, table_of(receiver)) == ()
    for name, item in receiver.model.named_parameters():
        assert id(item) == before[name][0]
        assert torch.equal(item.float(), before[name][1].float())


@pytest.mark.parametrize("field", ["source_offset", "target_offset"])
def test_one_offset_that_is_off_by_one_is_found(receiver: Receiver, field: str) -> None:
    table = table_of(receiver)
    first = table.placements[0]
    axes = ((first.axes[0][0] - 1, *first.axes[0][1:]), *first.axes[1:])
    shifted = msgspec.structs.replace(first, axes=axes, **{field: getattr(first, field) + 1})
    wrong = msgspec.structs.replace(table, placements=(shifted, *table.placements[1:]))
    (found,) = compare_with_oracle(receiver, wrong)
    assert found.target == "packed"
    assert found.elements >= 40
    assert "the table places gate there" in found.detail or "nothing is written" in found.detail


def test_two_sources_that_are_swapped_are_found(receiver: Receiver) -> None:
    table = table_of(receiver)
    gate, up, *rest = table.placements
    swapped = (
        msgspec.structs.replace(gate, source=up.source),
        msgspec.structs.replace(up, source=gate.source),
    )
    (found,) = compare_with_oracle(receiver, msgspec.structs.replace(table, placements=(*swapped, *rest)))
    assert (found.target, found.elements) == ("packed", 24 * 40)


def test_a_write_that_the_table_leaves_out_is_found(receiver: Receiver) -> None:
    table = table_of(receiver)
    (found,) = compare_with_oracle(receiver, msgspec.structs.replace(table, placements=table.placements[:-1]))
    assert (found.target, found.elements) == ("norm", 40)


def test_padding_with_another_value_is_found(receiver: Receiver) -> None:
    table = table_of(receiver)
    fills = tuple(Fill(item.target, item.offset, item.axes, 1.0) for item in table.fills)
    (found,) = compare_with_oracle(receiver, msgspec.structs.replace(table, fills=fills))
    assert (found.target, found.elements) == ("packed", 4 * 40)
    assert "filled" in found.detail


def test_a_loader_that_raises_is_told() -> None:
    model = Packed(torch.float32)

    def refuse(weights: Iterator[tuple[str, Tensor]]) -> None:
        raise KeyError(next(weights)[0])

    honest = Receiver(model, model.load_weights, TableKey("reference", "1", "Packed"))
    refusing = Receiver(model, refuse, honest.key)
    (found,) = compare_with_oracle(refusing, table_of(honest))
    assert "KeyError: 'gate'" in found.detail
    assert compare_with_oracle(refusing, table_of(refusing)) == ()
    (found,) = compare_with_oracle(honest, table_of(refusing))
    assert "does not raise" in found.detail
