"""Names that were resolved wrongly elsewhere, as data, for both kinds of LoRA wrapper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from name_cases import NAMESPACES, ROWS, recorded, right_answer

from weightlane.manifest import Manifest, TensorSpec
from weightlane.receiver import UNKNOWN
from weightlane.types import Phase
from weightlane_vllm.names import map_names

if TYPE_CHECKING:
    from weightlane.receiver import NameEntry

NO_HOME = {
    *("drafter_strip_unknown", "unknown_plain", "unknown_suffixed", "no_dot", "first_segment"),
    # An engine's own name without the modules in between is no checkpoint's name.
    "moe_live_w13_leaf",
}
EXPERTS = "language_model.model.layers.5.mlp.experts."
HELD = f"{EXPERTS}base_layer.routed_experts."


def mapped(case: str, *, wrapper_loads: bool, expert_prefix: str = "") -> NameEntry:
    row = ROWS[case]
    worker = recorded(row["namespace"], wrapper_loads=wrapper_loads, expert_prefix=expert_prefix)
    (entry,) = map_names(Manifest(Phase.FULL, 1, (TensorSpec(row["incoming"], (2,), "float32"),)), worker)
    return entry


@pytest.mark.requirement("R39")
@pytest.mark.requirement("R40")
@pytest.mark.requirement("R41")
@pytest.mark.requirement("R42")
@pytest.mark.requirement("R43")
@pytest.mark.requirement("R44")
@pytest.mark.requirement("R45")
@pytest.mark.requirement("R46")
@pytest.mark.requirement("R47")
@pytest.mark.requirement("R48")
@pytest.mark.requirement("R52")
@pytest.mark.parametrize("wrapper_loads", [False, True])
@pytest.mark.parametrize("case", ROWS)
def test_what_travels_is_spelt_as_the_loader_takes_it(case: str, *, wrapper_loads: bool) -> None:
    wire = mapped(case, wrapper_loads=wrapper_loads).wire
    assert wire == right_answer(ROWS[case], wrapper_loads=wrapper_loads), ROWS[case]["why"]


@pytest.mark.parametrize("wrapper_loads", [False, True])
@pytest.mark.parametrize("case", ROWS)
def test_it_reaches_a_live_tensor_if_there_is_one_and_else_says_so(case: str, *, wrapper_loads: bool) -> None:
    entry = mapped(case, wrapper_loads=wrapper_loads)
    homeless = case in NO_HOME or (case == "double_suffix" and not wrapper_loads)
    assert (not entry.targets, entry.rule == UNKNOWN) == (homeless, homeless)
    assert set(entry.targets) <= set(NAMESPACES[ROWS[case]["namespace"]]["live"])


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("case", ["shared_gate_plain", "shared_up_plain"])
def test_both_projections_of_a_shared_expert_reach_the_fused_one(case: str) -> None:
    (target,) = mapped(case, wrapper_loads=True).targets
    assert target.endswith(".shared_expert.gate_up_proj.base_layer.weight")


@pytest.mark.requirement("R41")
@pytest.mark.parametrize("wrapper_loads", [False, True])
@pytest.mark.parametrize("case", ["gdn_plain", "gdn_suffixed"])
def test_a_part_of_a_fused_input_projection_keeps_its_name_and_reaches_the_fused_one(
    case: str, *, wrapper_loads: bool
) -> None:
    entry = mapped(case, wrapper_loads=wrapper_loads)
    assert "in_proj_qkvz" not in entry.wire, "the loader would map it again, to in_proj_qkvzz"
    assert entry.targets == ("language_model.model.layers.2.linear_attn.in_proj_qkvz.base_layer.weight",)


@pytest.mark.requirement("R54")
@pytest.mark.parametrize("wrapper_loads", [False, True])
def test_an_expert_is_named_with_the_prefix_of_the_engine_s_expert_loader(*, wrapper_loads: bool) -> None:
    plain = mapped("moe_indexed_leaf", wrapper_loads=wrapper_loads)
    prefixed = mapped("moe_indexed_leaf", wrapper_loads=wrapper_loads, expert_prefix="base_layer.")
    assert plain.wire == f"{EXPERTS}17.down_proj.weight"
    assert prefixed.wire == f"{EXPERTS}17.down_proj.base_layer.weight"
    assert plain.targets == prefixed.targets == (f"{HELD}w2_weight",)


@pytest.mark.requirement("R46")
@pytest.mark.parametrize("wrapper_loads", [False, True])
@pytest.mark.parametrize(("case", "stack"), [("moe_gate_up_route", "w13"), ("moe_down_route", "w2")])
def test_an_alias_of_all_experts_reaches_their_stack(case: str, stack: str, *, wrapper_loads: bool) -> None:
    assert mapped(case, wrapper_loads=wrapper_loads).targets == (f"{HELD}{stack}_weight",)


@pytest.mark.requirement("R52")
def test_of_two_owners_the_live_one_takes_the_name() -> None:
    assert mapped("bug_two_owners", wrapper_loads=False).targets == ("m.x.a_proj.base_layer.weight",)
