"""Public reports of adapter configurations that engines misread, each with its right answer."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightlane.errors import PlanError
from weightlane.manifest import TensorSpec
from weightlane.peft import adapter_config_of, declared_lora, lora_name, peft_json
from weightlane.peft.engine_targets import SGLANG_EVERYTHING, TargetWords, engine_targets, unserved_modules
from weightlane.peft.expert_axes import as_named, axis_order, by_expert
from weightlane.peft.features import refused_features
from weightlane.peft.normal_form import normal_form
from weightlane.peft.served_rank import lora_rank, served_rank

DATA = Path(__file__).parent / "data" / "peft_config_cases.json"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads(DATA.read_text())}
SGLANG = TargetWords("sglang", SGLANG_EVERYTHING)
# Answered by the vLLM plugin: tests/vllm.
BY_VLLM = {"pf-07", "pf-17"}


def given(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[case]["input"], CASES[case]["expected"]


def tensors(*leaves: str, rank: int) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            lora_name(f"model.layers.0.{leaf}", side), (rank, 6) if side == "A" else (6, rank), "float32"
        )
        for leaf in leaves
        for side in ("A", "B")
    )


def lora(**fields: Any) -> dict[str, Any]:
    """The reports leave out what every peft configuration has."""
    return {"peft_type": "LORA", **fields}


def test_every_case_is_answered_here_or_by_the_plugin_that_it_is_about() -> None:
    source = Path(__file__).read_text()
    assert len([case for case in CASES if case.startswith("pf-")]) == 11
    assert not [case for case in set(CASES) - BY_VLLM if source.count(f'given("{case}")') != 1]


@pytest.mark.requirement("R18", part="the form that both will be given")
@pytest.mark.requirement("R19")
@pytest.mark.requirement("R20")
@pytest.mark.requirement("R21")
@pytest.mark.requirement("R25")
@pytest.mark.parametrize("form", ["dict", "dataclass", "object with to_dict"])
def test_a_dict_is_not_flattened_again_and_an_object_is_taken_too(form: str) -> None:
    case, expected = given("pf-01")
    assert form in case["accept_forms"]
    kinds = Enum("Kinds", {"LORA": "LORA", "CAUSAL_LM": "CAUSAL_LM"}, type=str)
    fields = {
        **case["config"],
        "target_modules": {"v_proj", "q_proj"},
        "peft_type": kinds["LORA"],
        "task_type": kinds["CAUSAL_LM"],
    }
    config: Any = fields
    if form == "dataclass":
        config = make_dataclass("LoraConfig", list(fields))(**fields)
    elif form == "object with to_dict":
        config = type("LoraConfig", (), {"to_dict": lambda self: 1 / 0})()
        config.__dict__.update(fields)
    declared = declared_lora(config)
    wire = json.loads(
        peft_json(adapter_config_of(declared, name="p", tensors=tensors("q_proj", "v_proj", rank=8)))
    )
    wanted = expected["config"]
    assert {key: wire[key] for key in ("r", "lora_alpha", "peft_type", "task_type")} == {
        key: wanted[key] for key in ("r", "lora_alpha", "peft_type", "task_type")
    }
    assert list(declared.target_modules or ()) == wanted["target_modules"]
    assert json.loads(msgspec.json.encode(declared))["target_modules"] == wanted["target_modules"]


@pytest.mark.requirement("R26")
def test_a_missing_type_is_an_error_that_lists_the_keys() -> None:
    with pytest.raises(PlanError, match=r"no peft_type; it has lora_alpha, r, target_modules"):
        declared_lora({"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})


@pytest.mark.requirement("R22", part="the translation; no launch uses it yet")
@pytest.mark.requirement("R23", part="the translation; no launch uses it yet")
def test_all_linear_is_one_word_at_launch_and_names_at_load() -> None:
    launch, at_launch = given("pf-02")
    load, at_load = given("pf-04")
    assert list(engine_targets(launch["target_modules"], SGLANG)) == at_launch["lora_target_modules"]
    declared = declared_lora(lora(**load["config"]))
    assert declared.target_modules == "all-linear"
    config = adapter_config_of(declared, name="p", tensors=tensors(*load["trained_modules"], rank=8))
    leaves = engine_targets(declared.target_modules, SGLANG, modules=config.target_modules)
    assert list(leaves) == at_load["options"][0]["target_modules"]
    assert not set(leaves) & set(at_load["never"])
    with pytest.raises(PlanError, match="has no word for every linear module"):
        engine_targets("all-linear", TargetWords("acme"))


@pytest.mark.requirement("R24", part="the translation; no launch uses it yet")
def test_a_regex_is_refused_at_launch_by_its_value_and_becomes_its_modules_at_load() -> None:
    case, expected = given("pf-03")
    assert expected["outcome"] == "refuse"
    with pytest.raises(PlanError) as caught:
        engine_targets(case["target_modules"], SGLANG)
    assert repr(case["target_modules"]) in str(caught.value)
    assert "Use 'all-linear' or a list of names." in str(caught.value)
    declared = declared_lora(lora(r=8, lora_alpha=16, target_modules=case["target_modules"]))
    config = adapter_config_of(declared, name="p", tensors=tensors("self_attn.q_proj", rank=8))
    assert engine_targets(declared.target_modules, SGLANG, modules=config.target_modules) == ("q_proj",)


def test_a_launch_is_checked_against_the_installed_engine() -> None:
    case, expected = given("pf-13")
    words = TargetWords("sglang", SGLANG_EVERYTHING, frozenset(case["installed_allowed"]))
    with pytest.raises(PlanError) as caught:
        engine_targets(case["target_modules"], words)
    assert [problem.subject for problem in caught.value.problems] == expected["unsupported"]
    assert engine_targets(["v_proj", "q_proj"], words) == ("q_proj", "v_proj")
    with pytest.raises(PlanError, match="launched without any module"):
        engine_targets([], words)


def test_rank_stabilised_scaling_is_folded_once_for_every_engine() -> None:
    """Each is sent alpha and no `use_rslora`: right for an engine that honours the key and for any other."""
    case, expected = given("pf-05")
    config = adapter_config_of(lora(**case["config"]), name="p", tensors=tensors("q_proj", rank=16))
    assert config.scaling == expected["effective_scale"]
    wire = json.loads(peft_json(config))
    for target, wanted in zip(case["targets"], expected["per_target"], strict=True):
        root = wire["r"] ** 0.5 if target["honours_rslora"] and wire.get("use_rslora") else wire["r"]
        assert wire["lora_alpha"] / root == expected["effective_scale"]
        if not target["honours_rslora"]:
            assert (wire["lora_alpha"], wire.get("use_rslora", False)) == (
                wanted["lora_alpha"],
                wanted["use_rslora"],
            )


@pytest.mark.requirement("R29")
def test_trained_token_rows_are_refused_by_name_with_the_mode_that_carries_them() -> None:
    case, expected = given("pf-10")
    config = adapter_config_of(lora(**case["config"]), name="p", tensors=tensors("q_proj", rank=64))
    (problem,) = refused_features(config.needs, (), receiver="vllm 0.32.0")
    assert problem.subject == expected["reason"]
    assert "vllm 0.32.0 does not carry" in problem.what
    assert problem.fix == "Mode merged could carry it."
    row = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    with pytest.raises(PlanError, match="trainable_tokens_delta"):
        adapter_config_of(
            lora(**case["config"]),
            name="p",
            tensors=(*tensors("q_proj", rank=64), TensorSpec(row, (2, 6), "float32")),
        )


@pytest.mark.requirement("R27")
def test_the_rank_is_read_in_one_place_from_either_block() -> None:
    case, expected = given("pf-11")
    assert [served_rank(config) for config in case["configs"]] == expected["rank"]
    assert [bool(served_rank(config)) for config in case["configs"]] == expected["serve_adapter"]
    assert [lora_rank(config) for config in case["configs"]] == [16, 32, 16, 32, 0]
    assert lora_rank(None) == lora_rank({}) == lora_rank({"lora_rank": None, "lora": {"rank": None}}) == 0
    assert lora_rank({"r": 8}) == lora_rank({"dim": 8}) == 8
    with pytest.raises(PlanError, match=r"the ranks are lora_rank 32, lora\.rank 16"):
        lora_rank({"lora_rank": 32, "lora": {"rank": 16}})
    with pytest.raises(PlanError, match=r"lora\.rank: the rank is '16'"):
        lora_rank({"lora": {"rank": "16"}})


def test_an_adapter_on_fused_modules_is_refused_and_members_of_a_group_are_served() -> None:
    fused, _ = given("pf-19")
    apart, _ = given("ab-05")

    def problems(modules: list[str], case: dict[str, Any]) -> list[str]:
        return [
            problem.subject
            for problem in unserved_modules(
                modules, case["engine_lora_targets"], packed=case["packed"], receiver="vllm"
            )
        ]

    assert problems([f"model.layers.0.{leaf}" for leaf in fused["adapter_targets"]], fused) == [
        "gate_up_proj",
        "qkv_proj",
    ]
    assert problems(apart["adapter_targets"], apart) == ["down_proj"]
    assert problems(["model.layers.0.self_attn.q_proj"], apart) == []
    assert problems(["q_proj", "down_proj"], apart) == ["down_proj"]


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.19.0", "0.19.1", "0.21.2"])
def test_factors_of_experts_are_told_apart_by_shape_then_by_release(version: str) -> None:
    import torch

    case, expected = given("mo-07")
    wanted = expected["both_give"]
    for made, order in (("old_peft", "turned"), ("peft_0.21.2", "as-named")):
        pair = [torch.tensor(case["adapters"][made][side]) for side in ("lora_A", "lora_B")]
        shapes = {"first": tuple(pair[0].shape), "second": tuple(pair[1].shape)}
        told = axis_order("p", parameter=tuple(case["param_shape"]), storage="out-in", **shapes)
        assert told == order
        first, second = as_named(*pair, experts=case["E"], order=told)
        assert (first.tolist(), second.tolist()) == (wanted["lora_A"], wanted["lora_B"])
        assert (second @ first).tolist() == wanted["delta_out_in"]
    square: dict[str, Any] = {
        "parameter": tuple(case["square_param_shape"]),
        "first": (1, 4),
        "second": (4, 1),
    }
    turned = version in ("0.17.1", "0.18.0", "0.19.0")
    assert axis_order("p", storage="out-in", peft_version=version, **square) == (
        "turned" if turned else "as-named"
    )
    turned = version == "0.19.0"
    assert axis_order("p", storage="in-out", peft_version=version, **square) == (
        "turned" if turned else "as-named"
    )
    with pytest.raises(PlanError, match="has no peft_version"):
        axis_order("p", storage="out-in", **square)
    with pytest.raises(PlanError, match="neither way"):
        axis_order("p", storage="out-in", **{**square, "first": (1, 5)})


def test_a_stack_of_experts_is_taken_apart_as_peft_stacked_it() -> None:
    import torch

    case, expected = given("mo-08")
    shapes = [list(shape) for shape in expected["result"].values()]
    experts, rank = case["E"], case["r"]
    flat = [torch.arange(size[0] * size[1]).reshape(size) for size in case["flat"].values()]
    first, second = by_expert(*flat, experts=experts)
    assert [list(first.shape), list(second.shape)] == shapes
    for expert in range(experts):
        assert torch.equal(first[expert], flat[0][expert * rank : (expert + 1) * rank])
        assert torch.equal(second[expert], flat[1][:, expert::experts])
    turned = as_named(*flat, experts=experts, order="turned")
    again = as_named(*turned, experts=experts, order="turned")
    assert all(torch.equal(a, b) for a, b in zip(again, flat, strict=True))


def test_groups_that_an_engine_takes_whole_are_filled_with_zeros() -> None:
    """SGLang of 0.5.23 looks for the matrices of `v_proj` wherever it has those of `q_proj`."""
    config = adapter_config_of(lora(r=2, lora_alpha=4), name="p", tensors=tensors("a.q_proj", rank=2))
    weights = {
        f"model.layers.0.a.{leaf}": (rows, 6) for leaf, rows in (("q_proj", 6), ("k_proj", 3), ("v_proj", 3))
    }
    groups = (("q_proj", "k_proj", "v_proj"),)
    normal, specs = normal_form(config, tensors("a.q_proj", rank=2), groups=groups, weights=weights)
    assert [name.rpartition(".")[2] for name in normal.target_modules] == ["q_proj", "k_proj", "v_proj"]
    assert [spec.shape for spec in specs] == [(2, 6), (6, 2), (2, 6), (3, 2), (2, 6), (3, 2)]
    assert not normal.own
