"""Names, layouts and values against what `save_pretrained` of the same model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import (
    deepseek_v3,
    gpt_oss,
    llama,
    made,
    mixtral,
    named_tensors,
    qwen2_5_vl,
    qwen3_moe,
    recipes_of,
    wrapped,
)
from torch import nn

from weightlane.errors import ExportError
from weightlane.export.recorded_ops import CannotRecordError, Chain, View, record
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BUILDS = [llama, qwen3_moe, mixtral, deepseek_v3, gpt_oss, qwen2_5_vl]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.requirement("R17")
def test_a_full_export_is_the_saved_checkpoint(build: Callable[[], Any], tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = build()
    mine = made(model, Phase.FULL)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert mine.keys() == saved.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in saved.items())
    live = {tensor.untyped_storage().data_ptr() for tensor in named_tensors(model).values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in mine.values()} <= live  # no copy was made


def test_some_of_these_models_have_other_names_in_memory() -> None:
    """The control of the test above: their own names would not do."""
    for build in (qwen3_moe, mixtral, deepseek_v3):
        model = build()
        assert set(named_tensors(model)) != set(made(model, Phase.FULL))


@pytest.mark.requirement("R12")
def test_each_experts_part_is_taken_from_where_it_lies() -> None:
    model = qwen3_moe()
    mine = made(model, Phase.FULL)
    fused = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    rows = fused.shape[1] // 2
    for expert in range(len(fused)):
        where = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(mine[f"{where}.gate_proj.weight"], fused[expert, :rows])
        assert torch.equal(mine[f"{where}.up_proj.weight"], fused[expert, rows:])


def test_experts_of_one_source_follow_each_other() -> None:
    order = [recipe.sources for recipe in recipes_of(qwen3_moe(), Phase.FULL)]
    runs = [sources for number, sources in enumerate(order) if number == 0 or order[number - 1] != sources]
    assert len(runs) == len(set(order))


def test_an_expert_is_merged_alone() -> None:
    """Making one expert's tensor computes one expert's: others would be made for nothing, once per expert."""
    from weightlane.export.deltas import ExpertLowRank

    model = wrapped(qwen3_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    calls: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(ExpertLowRank, "added", lambda *_: calls.append("all"))
    try:
        made(model, Phase.MERGED)
    finally:
        patch.undo()
    assert not calls


def test_a_conversion_that_loses_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading

    def losing(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        del model
        return {name: tensor for name, tensor in state.items() if "norm" not in name}

    monkeypatch.setattr(loading, "revert_weight_conversion", losing)
    with pytest.raises(
        ExportError, match=r"conversion of LlamaForCausalLM loses model\.layers\.0\.input_layernorm\.weight"
    ):
        recipes_of(llama(), Phase.FULL)


def test_a_conversion_that_cannot_be_expressed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading

    def drawing(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        del model
        return {name: torch.zeros(3) + tensor.sum() for name, tensor in state.items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", drawing)
    with pytest.raises(ExportError, match="checkpoint tensors of LlamaForCausalLM cannot be worked out"):
        recipes_of(llama(), Phase.FULL)


def rearranged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    first, second = state["first"], state["second"]
    return {
        "same": second,
        "view": first.transpose(0, 1)[1:].contiguous()[:, ::2],
        "joined": torch.cat([second, first.t().contiguous()[:, :2]], dim=0),
        "interleaved": first.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6),
    }


def test_whatever_is_done_to_tensors_is_done_again() -> None:
    tensors = {"first": torch.arange(24.0).reshape(4, 6), "second": torch.arange(10.0).reshape(5, 2)}
    found = record(rearranged, {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()})
    kinds = {name: type(made_) for name, (_, made_, _, _) in found.items()}
    assert kinds == {"same": type(None), "view": View, "joined": Chain, "interleaved": Chain}
    inputs = list(tensors.values())
    strided = [each.t().contiguous().t() for each in inputs]  # the same values, laid out otherwise
    for name, wanted in rearranged(tensors).items():
        first, how, shape, _ = found[name]
        for given in (inputs, strided):
            got = given[first] if how is None else how([given[number] for number in how.sources])
            assert (tuple(got.shape), torch.equal(got, wanted)) == (shape, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda state: {"x": state["x"].add_(1)},
        lambda state: {"x": state["x"] + torch.ones(2)},
        lambda state: {"x": torch.zeros(2)},
    ],
)
def test_what_is_no_function_of_the_tensors_is_not_recorded(function: Any) -> None:
    with pytest.raises(CannotRecordError):
        record(function, {"x": ((2,), torch.float32)})


def test_models_of_no_library_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(made(model, Phase.FULL)) == list(model.state_dict())
