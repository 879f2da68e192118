"""A name map from a contract is the one that a trace of that engine gives, for any number of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.manifest import Manifest, TensorSpec
from weightlane.trace.assumed import assumed_entries, assumed_from, assumed_problems
from weightlane.trace.contract import Refused
from weightlane.trace.entries import entries_from_table
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable

WHERE = "acme at http://far"


def manifest_of(tables: tuple[PlacementTable, ...], *more: str) -> Manifest:
    specs = [TensorSpec(source.canonical, source.shape, source.dtype, (0,)) for source in tables[0].sources]
    return Manifest(Phase.FULL, 1, (*specs, *(TensorSpec(name, (4,), "bfloat16", (0,)) for name in more)))


def test_it_says_what_a_trace_of_a_larger_model_says(
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
    traced: Callable[..., tuple[PlacementTable, ...]],
) -> None:
    contract = contract_of(fake_config())
    tables = traced(fake_config(layers=4, experts=8))
    manifest = manifest_of(tables)
    entries = assumed_entries(contract, manifest, {}, dtype="bfloat16")
    seen = entries_from_table(manifest, tables[0], {})
    assert [(item.wire, item.dtype, item.targets) for item in entries] == [
        (item.wire, item.dtype, item.targets) for item in seen
    ]
    assert {item.rule for item in entries} == {"assumed, plain names"}
    assert assumed_problems(contract, entries, receiver=WHERE) == []
    assert assumed_from(contract) == "from the snapshot of acme 1.0 FakeForCausalLM"


def problems_without(
    contract: Contract, manifest: Manifest, dropped: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    entries = assumed_entries(contract, manifest, dropped or {})
    return [
        (item.kind, item.subject, str(item)) for item in assumed_problems(contract, entries, receiver=WHERE)
    ]


def test_names_of_no_pattern_are_problems_with_near_ones(
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
    traced: Callable[..., tuple[PlacementTable, ...]],
) -> None:
    contract, tables = contract_of(fake_config()), traced(fake_config())
    found = problems_without(
        contract,
        manifest_of(tables, "model.layers.1.self_attn.q_prj.weight", "model.layers.1.mlp.down_proj.weight"),
    )
    assert [item[:2] for item in found] == [
        ("extra-name", "model.layers.1.self_attn.q_prj.weight")
        # Not the other: layer 1 is no dense one here, and which layers are is the checkpoint's affair.
    ]
    assert "Near: model.layers.1.self_attn.q_proj.weight" in found[0][2]
    assert problems_without(contract, manifest_of(tables)) == []


def test_a_group_that_is_sent_in_part_is_refused(
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
    traced: Callable[..., tuple[PlacementTable, ...]],
) -> None:
    contract = contract_of(fake_config())
    gone = ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight")
    found = problems_without(contract, manifest_of(traced(fake_config(), leave=gone)))
    assert [kind for kind, _, _ in found] == ["incomplete-group"] * 2
    assert [name in text for name, (_, _, text) in zip(gone, found, strict=True)] == [True, True]
    assert "model.layers.1.self_attn.qkv_proj.weight" in found[0][2]


def test_tied_heads_stay_here_and_refusals_are_passed_on(
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
    traced: Callable[..., tuple[PlacementTable, ...]],
) -> None:
    import msgspec

    contract = contract_of(fake_config())
    manifest = manifest_of(traced(fake_config()))
    reason = {"lm_head.weight": "tied to model.embed_tokens.weight"}
    entries = assumed_entries(contract, manifest, reason)
    assert [item.dropped for item in entries if item.dropped] == list(reason.values())
    assert problems_without(contract, manifest, reason) == []
    refusing = msgspec.structs.replace(
        contract, refused=(Refused("computed", "aten.exp", ("model.layers.{layer}.A_log",)),)
    )
    ((kind, subject, text),) = problems_without(refusing, manifest)
    assert (kind, subject) == ("snapshot", "model.layers.{layer}.A_log")
    assert "computed by aten.exp" in text


def test_what_travels_has_the_dtype_that_the_engine_tells(
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
    traced: Callable[..., tuple[PlacementTable, ...]],
) -> None:
    contract, manifest = contract_of(fake_config()), manifest_of(traced(fake_config()))
    travels = {
        item.canonical: item.dtype for item in assumed_entries(contract, manifest, {}, dtype="float16")
    }
    assert travels["model.norm.weight"] == "float16"
    assert travels["model.layers.1.mlp.gate.e_score_correction_bias"] == "float32"
    untold = {item.canonical: item.dtype for item in assumed_entries(contract, manifest, {})}
    assert untold["model.norm.weight"] == "bfloat16"
