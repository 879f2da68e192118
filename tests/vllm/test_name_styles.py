"""What a loader is handed in each style, from wrappers as a live model has them."""

from __future__ import annotations

import pytest

from weightlane_vllm.styles import Wrappers, styled_name

DENSE = Wrappers(
    frozenset({"model.embed_tokens", "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"}),
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
)
EXPERTS = Wrappers(
    frozenset({"model.layers.0.mlp.gate", "model.layers.0.mlp.experts"}),
    {"model.layers.0.mlp.experts": "base_layer."},
)


def same(name: str) -> str:
    return name


@pytest.mark.parametrize(
    ("name", "base_layer"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.base_layer.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.base_layer.bias"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.base_layer.weight"),
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_the_wrapper_stands_before_the_leaf_of_each_wrapped_module(name: str, base_layer: str) -> None:
    assert styled_name("base-layer", name, DENSE, same) == base_layer
    assert styled_name("plain", name, DENSE, same) == name


def test_a_stacked_place_is_the_fused_module_itself() -> None:
    def stacked(name: str) -> str:
        return name.replace(".q_proj.", ".qkv_proj.")

    name = "model.layers.0.self_attn.q_proj.weight"
    bare = Wrappers(DENSE.modules)  # the class declares no packing of its own
    assert (
        styled_name("base-layer", name, bare, stacked) == "model.layers.0.self_attn.q_proj.base_layer.weight"
    )


def test_a_renamed_prefix_keeps_the_senders_spelling() -> None:
    def renamed(name: str) -> str:
        return name.replace("model.language_model.", "language_model.model.")

    wrapped = Wrappers(frozenset({"language_model.model.embed_tokens"}))
    sent = styled_name("base-layer", "model.language_model.embed_tokens.weight", wrapped, renamed)
    assert sent == "model.language_model.embed_tokens.base_layer.weight"


def test_mixed_names_are_plain_but_for_experts() -> None:
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert styled_name("mixed", expert, EXPERTS, same) == (
        "model.layers.0.mlp.experts.3.up_proj.base_layer.weight"
    )
    assert styled_name("mixed", "model.layers.0.mlp.gate.weight", EXPERTS, same) == (
        "model.layers.0.mlp.gate.weight"
    )
    assert styled_name("base-layer", "model.layers.0.mlp.gate.weight", EXPERTS, same) == (
        "model.layers.0.mlp.gate.base_layer.weight"
    )
    assert styled_name("plain", expert, EXPERTS, same) == expert


def test_experts_take_the_prefix_that_their_own_loader_looks_for() -> None:
    without = Wrappers(frozenset({"m.experts"}), {"m.experts": ""})
    assert styled_name("mixed", "m.experts.0.up_proj.weight", without, same) == "m.experts.0.up_proj.weight"
    other = Wrappers(frozenset({"m.experts"}), {"m.experts": "inner."})
    assert (
        styled_name("mixed", "m.experts.0.up_proj.weight", other, same) == "m.experts.0.up_proj.inner.weight"
    )


def test_only_styles_that_differ_are_tried() -> None:
    assert Wrappers().styles == ("plain",)
    assert DENSE.styles == ("plain", "base-layer")
    assert EXPERTS.styles == ("plain", "mixed", "base-layer")
