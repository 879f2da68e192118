"""Public reports of expert tensors in another layout than the receiver's, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.errors import ExportError
from weightlane.expert_layout import expanded, expert_parts, expert_ranges, transposed_experts

REPORTS: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "name_cases.json").read_text())
}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape)


def test_fused_experts_become_one_tensor_per_expert_and_projection() -> None:
    told, wanted = REPORTS["mo-01"]["input"], REPORTS["mo-01"]["expected"]["result"]
    fused = {told["name"]: tuple(told["shape"])}
    fused |= {name: tuple(shape) for name, shape in told["also"].items()}
    made = {
        name: tensor
        for fused_name, shape in fused.items()
        for name, tensor in expanded(fused_name, numbered(shape))
    }
    assert {name: list(tensor.shape) for name, tensor in made.items()} == wanted
    whole = numbered((2, 6, 4))
    holder = "model.layers.0.mlp.experts"
    for expert in range(2):
        assert torch.equal(made[f"{holder}.{expert}.gate_proj.weight"], whole[expert, :3])
        assert torch.equal(made[f"{holder}.{expert}.up_proj.weight"], whole[expert, 3:])
    assert all(tensor.is_contiguous() for tensor in made.values())


def test_what_is_expanded_owns_its_storage() -> None:
    whole = numbered((2, 6, 4))
    made = dict(expanded("a.experts.gate_up_proj", whole))
    before = {name: tensor.clone() for name, tensor in made.items()}
    whole.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.items())


@pytest.mark.parametrize(
    "name",
    ["a.mlp.gate_up_proj.weight", "a.shared_experts.down_proj", "a.experts.3.down_proj.weight", "down_proj"],
)
def test_what_is_not_fused_stays_as_it_is(name: str) -> None:
    tensor = numbered((6, 4))
    ((given, same),) = expanded(name, tensor)
    assert given == name
    assert same is tensor


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 4)])
def test_a_shape_that_is_no_fused_one_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ExportError, match=r"a\.experts\.gate_up_proj has the shape"):
        expert_parts("a.experts.gate_up_proj", shape)


def test_each_share_of_the_experts_is_the_report_s() -> None:
    told = REPORTS["mo-14"]
    ranges = expert_ranges(told["input"]["num_experts"], told["input"]["ep_size"])
    assert {str(part): list(item) for part, item in enumerate(ranges)} == told["expected"]["ranges"]


@pytest.mark.parametrize("experts", range(7))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_every_expert_is_in_one_share_and_none_is_empty_without_need(experts: int, parts: int) -> None:
    ranges = expert_ranges(experts, parts)
    assert [expert for start, stop in ranges for expert in range(start, stop)] == list(range(experts))
    assert len(ranges) == parts
    assert sum(stop == start for start, stop in ranges) == max(0, parts - experts)


@pytest.mark.parametrize(("experts", "parts"), [(4, 0), (-1, 2)])
def test_shares_that_cannot_be_are_refused(experts: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{experts} experts"):
        expert_ranges(experts, parts)


def test_both_projections_of_gpt_oss_are_transposed_with_their_rows_in_order() -> None:
    told, wanted = REPORTS["mo-11"]["input"], REPORTS["mo-11"]["expected"]
    assert told["hidden"] != told["inter"], "equal sizes would hide a transposition that was left out"
    for given, made in (("fc1_out_in", "gate_up_proj"), ("fc2_out_in", "down_proj")):
        fused = transposed_experts([torch.tensor(told[given])] * told["E"])
        assert fused.tolist() == wanted[made]
        assert list(fused.shape) == wanted[f"{made}_shape"]
        assert fused.is_contiguous()
