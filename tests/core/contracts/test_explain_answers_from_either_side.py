"""`explain` on the questions that people have had: its answer alone lets them act."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightlane.manifest import TensorSpec
from weightlane.trace.explain import Known, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.contract import Contract
    from weightlane.trace.explanation import Explanation
    from weightlane.trace.table import PlacementTable

LAYER = "model.layers.1"
Q = f"{LAYER}.self_attn.q_proj.weight"
QKV = f"{LAYER}.self_attn.qkv_proj.weight"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
UP = f"{LAYER}.mlp.experts.2.up_proj.weight"
RECEIVER = "acme 1.0 at http://far"


def known_of(tables: tuple[PlacementTable, ...], **more: Any) -> Known:
    specs = [TensorSpec(item.canonical, item.shape, item.dtype, (0,)) for item in tables[0].sources]
    return Known(**{"receiver": RECEIVER, "tensors": specs, "dropped": {}, "tables": tables, **more})


@pytest.fixture(scope="module")
def known(fake_config: Callable[..., Any], traced: Callable[..., tuple[PlacementTable, ...]]) -> Known:
    return known_of(traced(fake_config(workers=2)))


def said(answer: Explanation) -> str:
    return " ".join(answer.says)


def test_a_part_of_a_packed_tensor_names_its_group_and_its_rows_per_worker(known: Known) -> None:
    answer = explain(Q, known)
    assert (answer.kind, answer.verdict, answer.rule) == ("checkpoint", "placed", "traced, plain names")
    assert set(answer.group) == {Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")}
    assert f"{QKV} is packed: it must travel in one sync with" in said(answer)
    assert [(route.worker, route.taken, route.put) for route in answer.routes] == [
        (0, "[0:4, :] of [8, 8]", "[0:4, :] of [8, 8]"),
        (1, "[4:8, :] of [8, 8]", "[0:4, :] of [8, 8]"),
    ]


def test_an_experts_part_lands_in_its_slice(known: Known) -> None:
    answer = explain(UP, known)
    assert {route.target for route in answer.routes} == {f"{LAYER}.mlp.experts.w13_weight"}
    assert [route.put for route in answer.routes] == ["[2, 6:12, :] of [4, 12, 8]"] * 2
    assert [route.taken for route in answer.routes] == ["[0:6, :] of [12, 8]", "[6:12, :] of [12, 8]"]
    assert "and 1 more" in said(answer)  # of 7 others in the group


def test_a_receivers_tensor_says_what_it_is_made_of(known: Known) -> None:
    answer = explain(QKV, known)
    assert (answer.kind, answer.verdict) == ("receiver", "placed")
    assert answer.group == tuple(Q.replace("q_proj", f"{name}_proj") for name in "qkv")
    assert "made of 3 checkpoint tensors" in said(answer)
    padded = explain("lm_head.weight", known)
    assert (padded.kind, padded.verdict) == ("checkpoint", "placed")
    owned = explain("rotary", known)
    assert owned.verdict == "owned"
    assert "the engine makes it itself" in said(owned)


def test_a_router_bias_that_nobody_exports_is_found_and_what_to_do(
    fake_config: Callable[..., Any], traced: Callable[..., tuple[PlacementTable, ...]], known: Known
) -> None:
    placed = explain(BIAS, known)
    assert placed.verdict == "placed"
    assert "named_buffers()" in said(placed)
    forgotten = explain(BIAS, known_of(traced(fake_config(workers=2), leave=(BIAS,))))
    assert (forgotten.kind, forgotten.verdict) == ("receiver", "uncovered")
    assert "nothing that is exported is written to it" in said(forgotten)
    assert "which named_parameters() does not list: see named_buffers()" in said(forgotten)


def with_lora(tables: tuple[PlacementTable, ...]) -> tuple[PlacementTable, ...]:
    """The tables of an engine that wraps attention, and no router."""
    wrapped = []
    for table in tables:
        targets = tuple(
            msgspec.structs.replace(item, name=item.name.replace("_proj.weight", "_proj.base_layer.weight"))
            for item in table.targets
        )
        wrapped.append(msgspec.structs.replace(table, targets=targets))
    return tuple(wrapped)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_a_lora_matrix_of_a_module_that_is_not_wrapped_would_bind_to_nothing(
    known: Known, prefix: str
) -> None:
    wrapped = known_of(with_lora(tuple(known.tables)), lora=True)
    answer = explain(f"{prefix}{LAYER}.mlp.gate.lora_A.default.weight", wrapped)
    assert (answer.kind, answer.verdict) == ("lora", "refused")
    assert f"holds that module in {LAYER}.mlp.gate.weight and does not wrap it" in said(answer)
    assert "It wraps down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj." in said(answer)
    assert "Take gate out of the adapter's target_modules" in said(answer)
    bound = explain(f"{prefix}{LAYER}.self_attn.q_proj.lora_B.weight", wrapped)
    assert bound.verdict == "placed"
    assert "qkv_proj.base_layer.weight is its base" in said(bound)


def test_a_lora_matrix_for_an_engine_without_lora_or_of_no_module(known: Known) -> None:
    off = explain(f"{LAYER}.self_attn.q_proj.lora_A.weight", known)
    assert off.verdict == "refused"
    assert "Start the engine with LoRA on" in said(off)
    lost = explain(f"{LAYER}.self_attn.q_prj.lora_A.weight", known_of(tuple(known.tables), lora=True))
    assert lost.verdict == "unknown"
    assert lost.near[0] == f"{LAYER}.self_attn.q_proj.lora_A.weight"


def test_a_misspelt_name_has_near_ones_of_both_sides(known: Known) -> None:
    answer = explain(f"{LAYER}.self_attn.q_pproj.weight", known)
    assert (answer.kind, answer.verdict) == ("unknown", "unknown")
    assert answer.near[0] == Q
    assert f"Did you mean {Q}?" in said(answer)
    assert explain(f"{LAYER}.self_attn.qvk_proj.weight", known).near[0] == QKV
    assert "lists the names of both sides" in said(explain("zzz", known))


def test_what_is_dropped_lost_or_refused_says_so(
    known: Known, fake_config: Callable[..., Any], traced: Callable[..., tuple[PlacementTable, ...]]
) -> None:
    from weightlane.trace.table import Obstacle

    tied = explain("lm_head.weight", known_of(tuple(known.tables), dropped={"lm_head.weight": "tied to it"}))
    assert (tied.verdict, tied.says) == ("dropped", ("It is not sent: tied to it.",))
    (table, _) = known.tables
    number = next(place for place, item in enumerate(table.sources) if item.canonical == Q)
    kept = tuple(item for item in table.placements if item.source != number)
    lost = explain(Q, known_of((msgspec.structs.replace(table, placements=kept),)))
    assert lost.verdict == "uncovered"
    assert "accepts it and writes it nowhere" in said(lost)
    blocked = msgspec.structs.replace(table, obstacles=(Obstacle("computed", "aten.exp", (Q,)),))
    refused = explain(Q, known_of((blocked,)))
    assert refused.verdict == "refused"
    assert "computed by aten.exp" in said(refused)


def test_a_snapshot_answers_where_there_is_no_table(
    known: Known, fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    assumed = Known(RECEIVER, (), {}, contract=contract_of(fake_config()))
    far = explain("model.layers.40.mlp.experts.90.up_proj.weight", assumed)
    assert far.rule == "snapshot of acme 1.0 FakeForCausalLM, plain names"
    assert far.routes[0].target == "model.layers.40.mlp.experts.w13_weight"
    assert far.routes[0].put == "slice 90 rows 2 of 2"
    assert far.group == ("model.layers.40.mlp.experts.90.gate_proj.weight",)
    misspelt = explain("model.layers.3.self_attn.q_pproj.weight", assumed)
    assert misspelt.near[0] == "model.layers.3.self_attn.q_proj.weight"
    packed = explain("model.layers.3.self_attn.qkv_proj.weight", assumed)
    assert (packed.kind, packed.verdict, len(packed.group)) == ("receiver", "placed", 3)
    assert packed.group[0] == "model.layers.3.self_attn.q_proj.weight"
    assert explain("rotary", assumed).verdict == "owned"
    untraced = explain(Q, Known(RECEIVER, known.tensors, {}))
    assert untraced.verdict == "unknown"
    assert "untraced" in said(untraced)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (Q.replace("layers.1", "layers.7"), "There is no layer 7 here: the last one is 1."),
        (QKV.replace("layers.1", "layers.7"), "There is no layer 7 here: the last one is 1."),
        (UP.replace("experts.2", "experts.64"), "There is no expert 64 here: the last one is 3."),
        (
            f"base_model.model.{Q}".replace("layers.1", "layers.7").replace("weight", "lora_A.weight"),
            "There is no layer 7 here: the last one is 1.",
        ),
    ],
)
def test_a_number_beyond_the_checkpoint_lands_nowhere(known: Known, name: str, missing: str) -> None:
    answer = explain(name, known)
    assert (answer.verdict, answer.says[0]) == ("unknown", missing)


def test_a_snapshot_stands_for_no_more_layers_than_the_checkpoint_has(
    known: Known, fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    contract, far = contract_of(fake_config()), Q.replace("layers.1", "layers.7")
    assumed = Known(RECEIVER, known.tensors, {}, contract=contract)
    assert explain(Q, assumed).verdict == "placed"
    assert explain(far, assumed).verdict == "unknown"
    # Without a checkpoint the snapshot's words hold for any number of layers.
    assert explain(far, Known(RECEIVER, (), {}, contract=contract)).verdict == "placed"
