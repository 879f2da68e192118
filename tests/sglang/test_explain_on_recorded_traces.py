"""`explain` on what SGLang 0.5.18's own loader was seen to do, and on snapshots of it.

The tables were recorded from servers with tiny models of `docs/contract_snapshots.py`: Glm4Moe at tensor
parallel 2, Qwen3-MoE with LoRA on, which loads no expert then.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from weightlane.manifest import TensorSpec
from weightlane.trace.contract_text import parse_contract
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.explain import Known, explain
from weightlane.trace.table import PlacementTable

HERE = Path(__file__).parent
SNAPSHOTS = HERE.parents[1] / "plugins/sglang/src/weightlane_sglang/contracts/0.5.18"
MIXTURE, WRAPPED = "Glm4MoeForCausalLM-tp2", "Qwen3MoeForCausalLM-tp1-lora"
LAYER = "model.layers.1"
Q = f"{LAYER}.self_attn.q_proj"
UP = f"{LAYER}.mlp.experts.3.up_proj"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
ADAPTER = "base_model.model."


def recorded(name: str) -> tuple[PlacementTable, ...]:
    raw = (HERE / f"data/traces/sglang-0.5.18-{name}.json").read_bytes()
    return msgspec.json.decode(raw, type=tuple[PlacementTable, ...])


def known(name: str) -> Known:
    tables = recorded(name)
    specs = [TensorSpec(item.canonical, item.shape, item.dtype, (0,)) for item in tables[0].sources]
    return Known("sglang 0.5.18", specs, {}, tables, lora=tables[0].key.lora)


def assumed(name: str) -> Known:
    path = SNAPSHOTS / f"{name}.txt"
    contract = parse_contract(path.read_text(), origin=str(path))
    return Known("sglang 0.5.18", (), {}, contract=contract, lora=contract.lora)


def test_the_tables_are_whole_but_for_the_experts_that_lora_hides() -> None:
    assert coverage_problems(recorded(MIXTURE), {}, receiver="sglang") == []
    problems = coverage_problems(recorded(WRAPPED), {}, receiver="sglang")
    assert {item.kind for item in problems} == {"unconsumed", "uncovered"}


def test_a_q_proj_of_a_packed_model() -> None:
    answer = explain(f"{Q}.weight", known(MIXTURE))
    assert (answer.verdict, len(answer.says)) == ("placed", 2)
    assert answer.group == (f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight")
    assert answer.says[1].endswith(f"must travel in one sync with {', '.join(answer.group)}.")
    assert [(route.worker, route.taken, route.put) for route in answer.routes] == [
        (0, "[0:32, :] of [64, 64]", "[0:32, :] of [64, 64]"),
        (1, "[32:64, :] of [64, 64]", "[0:32, :] of [64, 64]"),
    ]
    from_snapshot = explain(f"{Q}.weight", assumed("Qwen3ForCausalLM-tp2"))
    assert from_snapshot.group == answer.group
    assert [route.put for route in from_snapshot.routes] == ["rows 1 of 3, split by rows"]


def test_an_experts_up_proj() -> None:
    answer = explain(f"{UP}.weight", known(MIXTURE))
    assert answer.verdict == "placed"
    assert [route.put for route in answer.routes] == ["[3, 32:64, :] of [4, 64, 64]"] * 2
    assert [route.taken for route in answer.routes] == ["[0:32, :] of [64, 64]", "[32:64, :] of [64, 64]"]
    assert f"it must travel in one sync with {LAYER}.mlp.experts.3.gate_proj.weight, " in answer.says[1]
    assert len(answer.group) == 7
    from_snapshot = explain(f"{UP}.weight", assumed("Qwen3MoeForCausalLM-tp2"))
    assert [route.put for route in from_snapshot.routes] == ["slice 3 rows 2 of 2, split by rows"]
    assert from_snapshot.says[-1] == (
        f"It must travel in one sync with {LAYER}.mlp.experts.3.gate_proj.weight and the same tensors of "
        "every other expert."
    )


def test_an_experts_up_proj_that_the_loader_loses_with_lora_on() -> None:
    answer = explain(f"{UP}.weight", known(WRAPPED))
    assert answer.verdict == "uncovered"
    assert answer.says[0].endswith("writes it nowhere: it would be lost.")
    assert "without LoRA" in answer.says[-1]


def test_a_router_bias_that_a_trainer_holds_as_a_buffer() -> None:
    full = known(MIXTURE)
    answer = explain(BIAS, full)
    assert answer.verdict == "placed"
    assert {target.kind for target in full.tables[0].targets if target.name == BIAS} == {"parameter"}
    assert "named_buffers()" in answer.says[-1]
    number = next(place for place, item in enumerate(full.tables[0].sources) if item.canonical == BIAS)
    forgotten = tuple(
        msgspec.structs.replace(
            table,
            sources=tuple(
                msgspec.structs.replace(item, canonical="other", wire="other") if place == number else item
                for place, item in enumerate(table.sources)
            ),
            placements=tuple(item for item in table.placements if item.source != number),
        )
        for table in full.tables
    )
    answer = explain(BIAS, Known("sglang 0.5.18", [], {}, forgotten))
    assert (answer.kind, answer.verdict) == ("receiver", "uncovered")
    assert "nothing that is exported is written to it" in answer.says[0]
    assert "named_buffers()" in answer.says[-1]


def test_a_lora_matrix_of_a_module_that_is_not_wrapped() -> None:
    wrapped = known(WRAPPED)
    answer = explain(f"{ADAPTER}{LAYER}.mlp.gate.lora_A.weight", wrapped)
    assert (answer.kind, answer.verdict) == ("lora", "refused")
    assert f"holds that module in {LAYER}.mlp.gate.weight and does not wrap it" in answer.says[0]
    assert answer.says[1] == "It wraps embed_tokens, k_proj, lm_head, o_proj, q_proj, v_proj."
    assert answer.says[2].startswith("Take gate out of the adapter's target_modules")
    assert explain(f"{ADAPTER}{Q}.lora_A.weight", wrapped).verdict == "placed"


def test_a_lora_matrix_of_an_expert_that_is_not_loaded() -> None:
    answer = explain(f"{ADAPTER}{UP}.lora_A.weight", known(WRAPPED))
    assert answer.verdict == "refused"
    assert "writes its own weight nowhere" in answer.says[0]
    assert "start the engine without LoRA" in answer.says[-1]


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_lora_matrix_of_what_the_receiver_packs_is_of_its_parts(side: str) -> None:
    name = f"{ADAPTER}{LAYER}.self_attn.%s_proj.lora_{side}.weight"
    for here in (known(WRAPPED), assumed("Qwen3ForCausalLM-tp1-lora")):
        answer = explain(name % "qkv", here)
        assert (answer.verdict, set(answer.near)) == ("unknown", {name % part for part in "qkv"})
        assert "makes of" in answer.says[0]
        assert Q in answer.says[0]


def test_a_misspelt_name() -> None:
    for here in (known(MIXTURE), assumed("Qwen3MoeForCausalLM-tp2")):
        answer = explain(f"{LAYER}.mlp.experts.3.up_prj.weight", here)
        assert answer.verdict == "unknown"
        assert answer.near[0] == f"{UP}.weight"
        assert answer.says[-1] == f"Did you mean {answer.near[0]}?"
