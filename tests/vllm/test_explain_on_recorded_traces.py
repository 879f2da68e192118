"""`explain` on what vLLM 0.32's own loader was seen to do; the tables were recorded from it.

Made by `docs/contract_snapshots.py`'s tiny models: Glm4Moe at tensor parallel 2, Qwen3 with LoRA on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from weightlane.manifest import TensorSpec
from weightlane.trace.contract_making import contract_from_tables
from weightlane.trace.contract_text import contract_text
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.explain import Known, explain
from weightlane.trace.table import PlacementTable

HERE = Path(__file__).parent
SNAPSHOTS = HERE.parents[1] / "plugins/vllm/src/weightlane_vllm/contracts/0.32.0"
MIXTURE, WRAPPED = "Glm4MoeForCausalLM-tp2", "Qwen3ForCausalLM-tp1-lora"
LAYER = "model.layers.1"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"


def recorded(name: str) -> tuple[PlacementTable, ...]:
    raw = (HERE / f"data/traces/vllm-0.32.0-{name}.json").read_bytes()
    return msgspec.json.decode(raw, type=tuple[PlacementTable, ...])


def known(name: str) -> Known:
    tables = recorded(name)
    specs = [TensorSpec(item.canonical, item.shape, item.dtype, (0,)) for item in tables[0].sources]
    return Known("vllm 0.32.0", specs, {}, tables, lora=tables[0].key.lora)


@pytest.mark.parametrize("name", [MIXTURE, WRAPPED])
def test_the_snapshot_is_what_the_tables_show(name: str) -> None:
    tables = recorded(name)
    assert coverage_problems(tables, {}, receiver="vllm") == []
    assert contract_text(contract_from_tables(tables, {})) == (SNAPSHOTS / f"{name}.txt").read_text()


def test_a_q_proj_of_a_packed_model() -> None:
    answer = explain(f"{LAYER}.self_attn.q_proj.weight", known(MIXTURE))
    assert answer.verdict == "placed"
    assert answer.group == (f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight")
    assert [(route.worker, route.taken, route.put) for route in answer.routes] == [
        (0, "[0:32, :] of [64, 64]", "[0:32, :] of [64, 64]"),
        (1, "[32:64, :] of [64, 64]", "[0:32, :] of [64, 64]"),
    ]
    assert {route.target for route in answer.routes} == {f"{LAYER}.self_attn.qkv_proj.weight"}


def test_an_experts_up_proj() -> None:
    answer = explain(f"{LAYER}.mlp.experts.3.up_proj.weight", known(MIXTURE))
    assert answer.verdict == "placed"
    assert [route.put for route in answer.routes] == ["[3, 32:64, :] of [4, 64, 64]"] * 2
    assert [route.taken for route in answer.routes] == ["[0:32, :] of [64, 64]", "[32:64, :] of [64, 64]"]
    assert f"{LAYER}.mlp.experts.3.gate_proj.weight" in answer.group


def test_a_router_bias_buffer() -> None:
    full = known(MIXTURE)
    assert explain(BIAS, full).verdict == "placed"
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
    answer = explain(BIAS, Known("vllm 0.32.0", [], {}, forgotten))
    assert (answer.kind, answer.verdict) == ("receiver", "uncovered")
    assert "nothing that is exported is written to it" in answer.says[0]
    assert "named_buffers()" in answer.says[-1]


def test_a_lora_matrix_of_a_module_that_is_not_wrapped() -> None:
    wrapped = known(WRAPPED)
    answer = explain("base_model.model.lm_head.lora_A.weight", wrapped)
    assert answer.verdict == "refused"
    assert "holds that module in lm_head.weight and does not wrap it" in answer.says[0]
    assert answer.says[1] == (
        "It wraps down_proj, embed_tokens, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj."
    )
    assert "Take lm_head out of the adapter's target_modules" in answer.says[2]
    bound = explain(f"base_model.model.{LAYER}.self_attn.q_proj.lora_A.weight", wrapped)
    assert bound.verdict == "placed"


def test_a_misspelt_name() -> None:
    answer = explain(f"{LAYER}.mlp.experts.3.up_prj.weight", known(MIXTURE))
    assert answer.verdict == "unknown"
    assert answer.near[0] == f"{LAYER}.mlp.experts.3.up_proj.weight"
    assert answer.says[-1] == f"Did you mean {answer.near[0]}?"
