"""SGLang's loader takes plain names alone, and ignores any other without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.manifest import Manifest, TensorSpec
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.types import Phase
from weightlane_sglang.names import map_names
from weightlane_sglang.spelling import landing, plain_name

REPORTS = json.loads((Path(__file__).parent / "data" / "name_cases.json").read_text())
LAYER = "model.layers.0."


def worker(told: dict[str, Any], expected: tuple[str, ...]) -> WorkerDescription:
    return WorkerDescription(
        0, 1, "h", 0, "i",
        live=tuple(LiveTensor(name, (2,), "float32") for name in told["receiver_params"]),
        expected=tuple(ExpectedTensor(name, (2,), "float32") for name in expected),
        packed={owner: tuple(pieces) for owner, pieces in told["packed"].items()},
    )  # fmt: skip


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: str(report["id"]))
def test_a_reported_name_travels_and_lands_where_the_report_wants_it(report: dict[str, Any]) -> None:
    told, targets = report["input"], report["expected"]["targets"]
    checkpoint = tuple(target["wire"] for target in targets.values())
    manifest = Manifest(Phase.FULL, 1, tuple(TensorSpec(name, (2,), "float32") for name in told["exported"]))
    entries = map_names(manifest, worker(told, checkpoint))
    assert {entry.canonical: (entry.wire, *entry.targets) for entry in entries} == {
        name: (target["wire"], target["param"]) for name, target in targets.items()
    }
    for target in targets.values():
        _, shard = landing(target["wire"], told["receiver_params"], told["packed"])
        assert (shard or None) == target["shard"]


@pytest.mark.requirement("R53")
@pytest.mark.parametrize(
    ("exported", "sent"),
    [
        (f"{LAYER}self_attn.q_proj.base_layer.weight", f"{LAYER}self_attn.q_proj.weight"),
        (f"base_model.model.{LAYER}mlp.down_proj.base_layer.bias", f"{LAYER}mlp.down_proj.bias"),
        (f"{LAYER}mlp.experts.base_layer.base_layer.gate_up_proj", f"{LAYER}mlp.experts.gate_up_proj"),
        (f"{LAYER}base_layernorm.weight", f"{LAYER}base_layernorm.weight"),
        (f"{LAYER}pre.base_layers.3.weight", f"{LAYER}pre.base_layers.3.weight"),
        ("base_layer.weight", "base_layer.weight"),
        ("model.base_layer", "model.base_layer"),
        (f"encoder.base_model.model.{LAYER}norm.weight", f"encoder.base_model.model.{LAYER}norm.weight"),
        ("lm_head", "lm_head"),
        ("", ""),
    ],
)
def test_whole_wrapper_parts_and_peft_s_root_are_removed_and_nothing_else(exported: str, sent: str) -> None:
    assert plain_name(exported) == sent


@pytest.mark.requirement("R53")
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["model", "layers", "0", "base_layer", "base_layernorm", "weight"]), max_size=7)
)
def test_what_was_removed_once_is_gone(parts: list[str]) -> None:
    once = plain_name(".".join(parts))
    assert plain_name(once) == once
    assert [part for part in once.split(".") if part != "base_layer"] == [
        part for part in ".".join(parts).split(".") if part != "base_layer"
    ]
    assert ".base_layer." not in once


def test_a_piece_is_not_found_inside_a_fused_name() -> None:
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    live = {"a.qkv_proj.weight", "a.qkv_proj.bias"}
    assert landing("a.qkv_proj.bias", live, packed) == ("a.qkv_proj.bias", "")
    assert landing("a.v_proj.weight", live, packed) == ("a.qkv_proj.weight", "v")
    assert landing("a.xv_proj.weight", live, packed) == ("", "")
    assert landing("v_proj.weight", {"qkv_proj.weight"}, packed) == ("qkv_proj.weight", "v")
