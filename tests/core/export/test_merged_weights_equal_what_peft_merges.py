"""The functional merge against peft's own `merge_and_unload`: bit for bit, the live model untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import (
    TARGETS,
    gpt2,
    llama,
    made,
    merged_by_peft,
    mixtral,
    quiet,
    qwen3_moe,
    recipes_of,
    same,
    sources_of,
    state_of,
    step,
    wrapped,
)

from weightlane.errors import ExportError
from weightlane.export.recipe import Source
from weightlane.export.recipes import recipes
from weightlane.export.rounding import RoundingLoss
from weightlane.peft.expert_axes import by_expert
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONV1D = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}

FEATURES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (llama, {}),
    "rank-stabilised": (llama, {"use_rslora": True}),
    "patterns": (llama, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "dora": (llama, {"use_dora": True}),
    "embedding": (llama, {"target_modules": [*TARGETS, "embed_tokens"]}),
    "embedding with dora": (llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "trained bias": (lambda: llama(attention_bias=True), {"bias": "all"}),
    "bias of the second matrix": (
        lambda: llama(attention_bias=True),
        {"target_modules": ["q_proj"], "lora_bias": True},
    ),
    "trained rows": (llama, {"trainable_token_indices": {"embed_tokens": [1, 5]}}),
    "modules to save": (llama, {"modules_to_save": ["lm_head"]}),
    "transposed": (gpt2, CONV1D),
    "transposed with a bias": (gpt2, {**CONV1D, "lora_bias": True}),
    "transposed with dora": (gpt2, {**CONV1D, "use_dora": True}),
    "bfloat16": (lambda: llama(torch.bfloat16), {}),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.requirement("R2")
@pytest.mark.requirement("R6")
def test_every_feature_merges_as_peft_merges_it(feature: str) -> None:
    base, config = FEATURES[feature]
    model = wrapped(base(), **config)
    before = state_of(model)
    mine, theirs = made(model, Phase.MERGED), merged_by_peft(model)
    assert same(mine, theirs)
    assert same(state_of(model), before)
    # The control: without the adapter, or with half of it, the same comparison fails.
    untouched = made(model, Phase.BASE)
    assert untouched.keys() == mine.keys()
    assert not same(untouched, theirs)
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if ".lora_" in name).mul_(0.5)
    assert not same(made(model, Phase.MERGED), theirs)


@pytest.mark.parametrize("build", [qwen3_moe, mixtral])
@pytest.mark.requirement("R12")
def test_fused_experts_merge_and_come_apart(build: Callable[[], Any], tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = wrapped(build(), target_modules=["q_proj"], target_parameters=EXPERTS)
    before = state_of(model)
    mine = made(model, Phase.MERGED)
    assert same(state_of(model), before)
    with quiet():
        model.merge_and_unload().save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if ".experts.0." in name]
    for name, tensor in mine.items():  # one expert at a time here, all at once there: another kernel
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)


def test_the_axes_of_expert_matrices_follow_their_shapes() -> None:
    from weightlane.export.deltas import ExpertLowRank

    generator = torch.Generator().manual_seed(0)
    experts, rank, inputs, outputs = 3, 2, 5, 7
    first = torch.randn(rank * experts, inputs, generator=generator)
    second = torch.randn(outputs, rank * experts, generator=generator)
    for rows_in, shape in ((True, (inputs, outputs)), (False, (outputs, inputs))):
        step_ = ExpertLowRank(2.0, experts, rows_in)
        base = torch.zeros(experts, *shape)
        whole = step_.added(base, base, [first, second])
        for expert in range(experts):
            a = first.reshape(experts, rank, inputs)[expert]
            b = second.reshape(outputs, rank, experts)[:, :, expert]
            wanted = 2.0 * (b @ a)
            torch.testing.assert_close(whole[expert], wanted.T if rows_in else wanted)
            torch.testing.assert_close(
                step_.added_to_one(base[expert], expert, [first, second]), whole[expert]
            )


def test_active_adapters_are_merged_or_the_one_that_is_named() -> None:
    from peft import LoraConfig

    model = wrapped(llama(), "first")
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"]))
    step(model, seed=3)
    both = {}
    for name in ("first", "second"):
        model.set_adapter(name)
        both[name] = merged_by_peft(model)
        assert same(made(model, Phase.MERGED), both[name])
    assert same(made(model, Phase.MERGED, "first"), both["first"])
    assert not same(both["first"], both["second"])
    model.base_model.set_adapter(["first", "second"])
    together = made(model, Phase.MERGED)
    assert same(together, merged_by_peft(model))
    assert not same(together, both["first"])


def test_adapters_in_a_model_without_the_wrapper_merge_the_same() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    plain = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS), llama())
    model = wrapped(llama())
    plain.load_state_dict(model.base_model.model.state_dict())
    assert same(made(plain, Phase.MERGED), made(model, Phase.MERGED))


def test_a_trained_copy_unties_what_was_tied() -> None:
    tied = wrapped(llama(tie_word_embeddings=True))
    aliases = {recipe.name: recipe.alias_of for recipe in recipes_of(tied, Phase.MERGED) if recipe.alias_of}
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    rows = wrapped(llama(tie_word_embeddings=True), trainable_token_indices={"embed_tokens": [1, 5]})
    assert [recipe.alias_of for recipe in recipes_of(rows, Phase.MERGED) if recipe.alias_of] == list(
        aliases.values()
    )
    for config in ({"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}):
        untied = wrapped(llama(tie_word_embeddings=True), **config)
        assert not [recipe.name for recipe in recipes_of(untied, Phase.MERGED) if recipe.alias_of]
        mine = made(untied, Phase.MERGED)
        assert not torch.equal(mine["lm_head.weight"], mine["model.embed_tokens.weight"])


def test_a_merge_inside_autocast_is_as_exact_as_outside() -> None:
    model = wrapped(llama())
    outside = made(model, Phase.MERGED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(made(model, Phase.MERGED), outside)


def test_bfloat16_is_rounded_once_where_peft_rounds_twice() -> None:
    model = wrapped(llama(torch.bfloat16)).to(torch.bfloat16)  # its matrices too
    mine, theirs, exact = (
        made(model, Phase.MERGED),
        merged_by_peft(model),
        made(model.float(), Phase.MERGED),
    )
    off = dict.fromkeys(("mine", "theirs"), 0.0)
    for name, tensor in exact.items():
        off["mine"] += float((mine[name].float() - tensor).abs().sum())
        off["theirs"] += float((theirs[name].float() - tensor).abs().sum())
        assert torch.equal(mine[name], tensor.to(torch.bfloat16))
    assert off["mine"] < off["theirs"]


def test_what_rounding_takes_from_an_update_is_told() -> None:
    lost = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = wrapped(llama(dtype))
        loss = RoundingLoss()
        assert loss.update_lost is None
        with loss.measured():
            made(model, Phase.MERGED)
        made(model, Phase.MERGED)  # not measured
        assert loss.tensors == 3
        lost[dtype] = loss.update_lost
    assert lost[torch.float32] == 0
    assert lost[torch.bfloat16] is not None
    assert 1e-4 < lost[torch.bfloat16] < 0.2


@pytest.mark.parametrize(("release", "turned"), [("0.18.1", True), ("0.19.1", False), ("0.21.2", False)])
def test_square_experts_of_a_peft_that_keeps_no_word_in_its_layers_go_by_its_release(
    release: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    model = wrapped(qwen3_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    monkeypatch.setattr(peft, "__version__", release)
    (layer,) = (module for module in model.modules() if "ParamWrapper" in type(module).__name__)
    del layer._did_swap_in_out_features
    base, scaling = layer.get_base_layer().gate_up_proj, layer.scaling["default"]
    assert base.shape[1] == base.shape[2], "shapes tell nothing"
    pair = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    first, second = by_expert(*(item.detach() for item in pair), experts=len(base))
    change = second @ first * scaling
    wanted = (base + (change.mT if turned else change)).detach()
    merged = made(model, Phase.MERGED)
    for expert, rows in enumerate(wanted):
        for number, leaf in enumerate(("gate_proj", "up_proj")):
            given = merged[f"model.layers.0.mlp.experts.{expert}.{leaf}.weight"]
            torch.testing.assert_close(given, rows.chunk(2)[number], rtol=0, atol=1e-6)


def test_matrices_that_fit_their_experts_neither_way_are_named() -> None:
    model = wrapped(qwen3_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    sources = sources_of(model)
    (key,) = (name for name in sources if name.endswith("experts.lora_A.default.weight"))
    sources[key] = Source(key, (sources[key].shape[0], 7), "float32")
    with pytest.raises(ExportError, match=r"matrices of .*mlp\.experts have the shapes \[16, 7\] and"):
        recipes(model, sources, Phase.MERGED)
