from __future__ import annotations

import pytest

from weightlane.manifest import Manifest, TensorSpec
from weightlane.receiver import UNKNOWN, ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.types import Phase
from weightlane_vllm.mapper import NameMapper
from weightlane_vllm.names import Resolved, map_names, resolve
from weightlane_vllm.namespace import Namespace

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER = "model.layers.0."
PLAIN = {
    f"{LAYER}self_attn.qkv_proj.weight",
    f"{LAYER}self_attn.o_proj.weight",
    f"{LAYER}mlp.gate_up_proj.weight",
    f"{LAYER}input_layernorm.weight",
    "model.embed_tokens.weight",
}


def reach_of(
    name: str, live: set[str], packed: dict[str, tuple[str, ...]], renames: dict[str, str]
) -> Resolved:
    space = Namespace(live, NameMapper(prefixes=renames), packed, wrapper_loads=True)
    return resolve(name, space)


@pytest.mark.requirement("R42")
@pytest.mark.parametrize(
    ("name", "target", "rule"),
    [
        ("self_attn.k_proj.weight", "self_attn.qkv_proj.weight", "packed into qkv_proj"),
        ("mlp.up_proj.weight", "mlp.gate_up_proj.weight", "packed into gate_up_proj"),
        ("self_attn.o_proj.weight", "self_attn.o_proj.weight", "same name"),
        ("input_layernorm.weight", "input_layernorm.weight", "same name"),
    ],
)
def test_a_checkpoint_name_reaches_its_module(name: str, target: str, rule: str) -> None:
    reach = reach_of(LAYER + name, PLAIN, PACKED, {})
    assert (reach.target, reach.rule) == (LAYER + target, rule)


@pytest.mark.requirement("R42")
def test_a_wrapped_module_is_reached_inside_its_wrapper() -> None:
    live = {f"{LAYER}self_attn.qkv_proj.base_layer.weight", "model.embed_tokens.base_layer.weight"}
    reach = reach_of(f"{LAYER}self_attn.v_proj.weight", live, PACKED, {})
    assert reach.target == f"{LAYER}self_attn.qkv_proj.base_layer.weight"
    assert reach.rule == "packed into qkv_proj, inside its LoRA wrapper"
    assert reach_of("model.embed_tokens.weight", live, PACKED, {}).target.startswith(
        "model.embed_tokens.base"
    )


def test_a_packing_the_module_does_not_use_is_not_applied() -> None:
    live = {"visual.attn.q_proj.weight"}
    assert reach_of("visual.attn.q_proj.weight", live, PACKED, {}).rule == "same name"


@pytest.mark.requirement("R40")
def test_a_renamed_prefix_is_followed() -> None:
    live = {"language_model.model.norm.weight"}
    reach = reach_of("model.norm.weight", live, {}, {"model.": "language_model.model."})
    assert reach.target == "language_model.model.norm.weight"
    assert reach.rule == "renamed by its model class"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.query_proj.weight",
        "weight",
    ],
)
def test_a_name_that_reaches_nothing_gets_no_target(name: str) -> None:
    reach = reach_of(name, PLAIN, PACKED, {})
    assert (reach.target, reach.rule) == ("", UNKNOWN)


def worker(*live: LiveTensor, expected: tuple[ExpectedTensor, ...] = ()) -> WorkerDescription:
    return WorkerDescription(
        worker=0,
        workers=1,
        host="here",
        process_id=1,
        incarnation="a",
        live=live,
        expected=expected,
        packed=PACKED,
    )


def manifest(*tensors: TensorSpec) -> Manifest:
    return Manifest(phase=Phase.FULL, world_size=1, tensors=tensors)


def test_entries_follow_the_manifest_and_keep_plain_names() -> None:
    live = LiveTensor(f"{LAYER}self_attn.qkv_proj.weight", (128, 64), "float32")
    names = [f"{LAYER}self_attn.{piece}_proj.weight" for piece in "vkq"]
    entries = map_names(manifest(*(TensorSpec(name, (32, 64), "float32") for name in names)), worker(live))
    assert [entry.canonical for entry in entries] == names
    assert [entry.wire for entry in entries] == names
    assert {entry.targets for entry in entries} == {(live.name,)}


def test_a_tied_head_is_dropped_with_its_reason() -> None:
    expected = ExpectedTensor("lm_head.weight", (512, 64), tied_to="model.embed_tokens.weight")
    (entry,) = map_names(
        manifest(TensorSpec("lm_head.weight", (512, 64), "float32")), worker(expected=(expected,))
    )
    assert entry.dropped == "the receiver reads model.embed_tokens.weight for it"
    assert entry.targets == ()


def test_an_untied_head_is_sent() -> None:
    live = LiveTensor("lm_head.weight", (512, 64), "float32")
    expected = ExpectedTensor("lm_head.weight", (512, 64))
    (entry,) = map_names(
        manifest(TensorSpec("lm_head.weight", (512, 64), "float32")), worker(live, expected=(expected,))
    )
    assert not entry.dropped
    assert entry.targets == ("lm_head.weight",)


@pytest.mark.parametrize(
    ("sent", "held", "travels"),
    [("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32"), ("int64", "float32", "int64")],
)
def test_floating_tensors_travel_in_the_receivers_dtype(sent: str, held: str, travels: str) -> None:
    live = LiveTensor("model.norm.weight", (64,), held)
    (entry,) = map_names(manifest(TensorSpec("model.norm.weight", (64,), sent)), worker(live))
    assert entry.dtype == travels


def test_an_unknown_name_keeps_its_dtype_and_says_unknown() -> None:
    (entry,) = map_names(manifest(TensorSpec("extra.weight", (2,), "float16")), worker())
    assert (entry.dtype, entry.targets, entry.rule, entry.dropped) == ("float16", (), UNKNOWN, "")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("b.block_sparse_moe.router.layer.weight", "b.block_sparse_moe.gate.weight"),
        ("b.block_sparse_moe.input_linear.weight", "b.block_sparse_moe.experts.routed_experts.w13_weight"),
        ("b.block_sparse_moe.output_linear.weight", "b.block_sparse_moe.experts.routed_experts.w2_weight"),
        ("b.router.layer.weight", ""),
    ],
)
def test_what_a_family_s_loader_renames_in_its_code_is_followed(name: str, target: str) -> None:
    live = {
        "b.gate.weight",
        "b.block_sparse_moe.gate.weight",
        "b.block_sparse_moe.experts.routed_experts.w13_weight",
        "b.block_sparse_moe.experts.routed_experts.w2_weight",
    }
    reach = reach_of(name, live, PACKED, {})
    assert (reach.wire, reach.target) == (name, target)
    assert reach_of(name, {"other.weight"}, PACKED, {}).target == ""
