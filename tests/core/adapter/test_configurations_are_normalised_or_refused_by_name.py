"""Any LoRA configuration becomes one frozen form, or every feature that cannot travel is named at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightlane.errors import PlanError
from weightlane.manifest import TensorSpec
from weightlane.peft import AdapterConfig, adapter_config_of, lora_name, parse_lora_name, peft_json
from weightlane.peft.features import refused_features

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def lora_config(**fields: Any) -> Any:
    from peft import LoraConfig  # here, since it imports transformers: seconds that collecting need not take

    return LoraConfig(**fields)


def tensors(rank: int = 4, modules: tuple[str, ...] = MODULES) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(lora_name(module, side), (rank, 64) if side == "A" else (32, rank), "float32")
        for module in modules
        for side in ("A", "B")
    )


def normal(config: object, given: tuple[TensorSpec, ...] | None = None) -> AdapterConfig:
    return adapter_config_of(config, name="policy", tensors=tensors() if given is None else given)


def problems_of(config: object, given: tuple[TensorSpec, ...] | None = None) -> dict[str, str]:
    with pytest.raises(PlanError) as caught:
        normal(config, given)
    return {problem.subject: f"{problem.what} {problem.fix}" for problem in caught.value.problems}


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], "all-linear", r".*\.(q|down)_proj"])
def test_objects_and_dicts_give_one_form_with_the_modules_of_the_tensors(targets: Any) -> None:
    config = lora_config(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.1)
    wanted = AdapterConfig("policy", 4, 8.0, MODULES)
    assert normal(config) == normal(config.to_dict()) == wanted
    assert wanted.scaling == 2.0
    saved = json.loads(json.dumps({**config.to_dict(), "target_modules": "all-linear"}))
    assert normal(saved) == wanted


def test_rank_stabilised_scale_is_folded_into_alpha() -> None:
    folded = normal(lora_config(r=4, lora_alpha=8, use_rslora=True))
    assert (folded.scaling, folded.alpha) == (4.0, 16.0)
    wire = json.loads(peft_json(folded))
    assert wire["lora_alpha"] / wire["r"] == 4.0
    assert "use_rslora" not in wire


@pytest.mark.parametrize(
    ("field", "value", "mode"),
    [
        ("use_dora", True, "merged"),
        ("bias", "lora_only", "merged"),
        ("lora_bias", True, "merged"),
        ("modules_to_save", ["lm_head"], "merged"),
        ("target_parameters", ["experts.gate_up_proj"], "merged"),
        ("trainable_token_indices", [1, 2], "merged"),
        ("fan_in_fan_out", True, "merged"),
        ("init_lora_weights", "pissa_niter_4", "merged"),
        ("layer_replication", [(0, 2), (1, 2)], "merged"),
        ("alora_invocation_tokens", [5], "No mode"),
        ("use_qalora", True, "No mode"),
    ],
)
def test_a_feature_is_refused_by_the_engine_that_does_not_carry_it_with_the_mode_that_could(
    field: str, value: Any, mode: str
) -> None:
    needs = normal({**vars(lora_config(r=4, lora_alpha=8)), field: value}).needs
    (problem,) = refused_features(needs, ("rank_pattern",), receiver="acme 1.0")
    assert (problem.kind, problem.subject) == ("peft-config", field)
    assert "which acme 1.0 does not carry" in problem.what
    assert mode in problem.fix
    assert not refused_features(needs, (field,), receiver="acme 1.0")


def test_a_field_of_a_later_peft_is_refused_wherever_it_goes() -> None:
    config = {**vars(lora_config(r=4, lora_alpha=8)), "of_a_later_peft": {"a": 1}, "empty_one": None}
    assert "does not know what it changes" in problems_of(config)["of_a_later_peft"]
    assert list(problems_of(config)) == ["of_a_later_peft"]


def test_everything_wrong_is_told_at_once() -> None:
    config = {**vars(lora_config(r=4)), "use_dora": True, "modules_to_save": ["lm_head"], "lora_alpha": "8"}
    stray = TensorSpec("base_model.model.model.embed_tokens.lora_embedding_A", (4, 512), "float32")
    given = (*tensors()[1:], stray)
    assert list(problems_of(config, given)) == [
        "modules_to_save", "use_dora", "lora_alpha", stray.name, MODULES[0],
    ]  # fmt: skip


def test_other_kinds_and_nameless_ones_are_refused() -> None:
    from peft.tuners.ia3 import IA3Config

    assert "IA3 adapters cannot be carried" in problems_of(IA3Config())["peft_type"]
    assert "has lora_alpha, r" in problems_of({"r": 4, "lora_alpha": 8})["peft_type"]


def test_matrices_of_another_rank_and_an_empty_adapter_are_refused() -> None:
    config = lora_config(r=4, lora_alpha=8)
    assert list(problems_of(config, tensors(rank=8))) == [spec.name for spec in tensors()]
    assert "no tensors" in problems_of(config, ())["adapter"]


@pytest.mark.parametrize("adapter", ["policy", "model"])
def test_names_are_those_of_pefts_own_checkpoint(model_folder: str, adapter: str) -> None:
    from adapter_models import wrapped
    from peft import get_peft_model_state_dict

    from weightlane.contexts import ExportContext
    from weightlane.torch_trainer.adapter import adapter_tensors
    from weightlane.torch_trainer.plugin import TORCH
    from weightlane.types import Phase

    model = wrapped(model_folder, name=adapter)
    export = ExportContext(TORCH, model, Phase.ADAPTER, 0, 1)
    mine = adapter_tensors(export)
    saved = get_peft_model_state_dict(model, adapter_name=adapter)
    assert set(mine) == set(saved)
    assert all(mine[name].data_ptr() == tensor.data_ptr() for name, tensor in saved.items())


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.q.lora_A.weight",
        "base_model.model.q.lora_A.default.weight",
        "base_model.model.q.weight",
    ],
)
def test_no_other_name_is_taken_for_a_matrix(name: str) -> None:
    assert parse_lora_name(name) is None
    assert parse_lora_name("base_model.model.q.lora_A.weight") == ("q", "A")
