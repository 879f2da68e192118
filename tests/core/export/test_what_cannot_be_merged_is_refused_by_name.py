"""Every refusal names the module, says why and what to do; nothing is passed over in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import TARGETS, export_of, llama, made, quiet, recipes_of, sources_of, wrapped
from torch import nn

from weightlane.errors import ExportError
from weightlane.export.recipes import recipes
from weightlane.torch_trainer.describe import describe
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable


def first_layer(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj


def merged_now(model: Any) -> None:
    with quiet():
        model.merge_adapter()


def switched_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def packed_base(model: Any) -> None:
    first_layer(model).base_layer.weight.quant_state = object()


def integer_base(model: Any) -> None:
    base = first_layer(model).base_layer
    base.weight = nn.Parameter(base.weight.to(torch.int8), requires_grad=False)


class QATLinear(nn.Linear):
    """Stands in for a layer of quantisation-aware training."""


def fake_quantised(model: Any) -> None:
    first_layer(model).base_layer.__class__ = QATLinear


def fake_quantised_by_attribute(model: Any) -> None:
    model.base_model.model.lm_head.weight_fake_quant = nn.Identity()


class FakeNewLayer:
    """A class of peft's that no release has yet."""


def of_a_later_peft(model: Any) -> None:
    layer = first_layer(model)
    layer.__class__ = type("NewLinear", (type(layer),), {"__module__": "peft.tuners.lora.new"})


def with_an_unknown_variant(model: Any) -> None:
    first_layer(model).lora_variant["default"] = FakeNewLayer()


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "merged": (merged_now, r"q_proj has adapter default merged into its base .* Call unmerge_adapter\(\)"),
    "switched off": (switched_off, r"adapters of .*q_proj are switched off"),
    "packed": (packed_base, r"The base of .*q_proj is quantised: Linear \(quant_state\).*dequantise it"),
    "integers": (integer_base, r"q_proj\.base_layer\.weight is int8, and an adapter is to be added"),
    "later layer": (of_a_later_peft, r"q_proj is peft's NewLinear \(peft\.tuners\.lora\.new\).*mode full"),
    "variant": (with_an_unknown_variant, r"q_proj has adapter default of the kind FakeNewLayer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_computes_otherwise_is_refused(change: str) -> None:
    model = wrapped(llama())
    recipes_of(model, Phase.MERGED)
    spoil, told = CHANGES[change]
    spoil(model)
    with pytest.raises(ExportError, match=told):
        recipes_of(model, Phase.MERGED)


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("spoil", [fake_quantised, fake_quantised_by_attribute])
def test_lora_on_fake_quantised_weights_is_refused(spoil: Callable[[Any], None]) -> None:
    model = wrapped(llama())
    spoil(model)
    with pytest.raises(ExportError, match=r"is trained with fake quantisation.*cannot be merged"):
        recipes_of(model, Phase.MERGED)


def test_a_base_with_an_adapter_in_it_is_no_base() -> None:
    model = wrapped(llama())
    merged_now(model)
    with pytest.raises(ExportError, match="merged into its base weight now"):
        recipes_of(model, Phase.BASE)


def test_kinds_of_adapters_other_than_lora_are_refused() -> None:
    from peft import IA3Config, get_peft_model

    with quiet():
        model = get_peft_model(
            llama(),
            IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        )
    with pytest.raises(ExportError, match=r"k_proj is peft's Linear \(peft\.tuners\.ia3\.layer\)"):
        recipes_of(model, Phase.MERGED)


def test_each_phase_says_which_mode_serves_a_model_instead() -> None:
    model, plain = wrapped(llama()), llama()
    with pytest.raises(ExportError, match=r"q_proj is a layer of peft's.*Use mode merged .*or mode adapter"):
        recipes_of(model, Phase.FULL)
    with pytest.raises(ExportError, match=r"LlamaForCausalLM has no adapter to merge.*Use mode full"):
        recipes_of(plain, Phase.MERGED)
    for phase in (Phase.MERGED, Phase.BASE, Phase.ADAPTER):
        with pytest.raises(ExportError, match=f"Phase {phase.value} was asked of .*no torch module"):
            recipes({"w": torch.zeros(2)}, sources_of({"w": torch.zeros(2)}), phase)
    assert (
        made(plain, Phase.BASE).keys() == made(plain, Phase.FULL).keys() == made(model, Phase.MERGED).keys()
    )


def test_an_adapter_that_is_not_there_is_refused_with_the_near_one() -> None:
    model = wrapped(llama())
    with pytest.raises(ExportError, match=r"has no adapter 'defaul'.*Use 'default'"):
        describe(export_of(model, Phase.MERGED, adapter="defaul"))
    assert describe(export_of(model, Phase.MERGED, adapter="default")).tensors


def test_a_matrix_that_the_trainer_lacks_is_named() -> None:
    model = wrapped(llama())
    sources = sources_of(model)
    lost = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    del sources[lost]
    with pytest.raises(ExportError, match=rf"{lost} is not among the trainer's tensors"):
        recipes(model, sources, Phase.MERGED)


def test_matrices_that_do_not_fit_are_refused_by_name() -> None:
    from weightlane.export.recipe import Source

    model = wrapped(llama(), target_modules=["embed_tokens", "q_proj"])
    for key in ("embed_tokens.base_layer.weight", "q_proj.base_layer.weight"):
        sources = sources_of(model)
        (whole,) = (name for name in sources if name.endswith(key))
        rows, columns = sources[whole].shape
        sources[whole] = Source(whole, (rows + 8, columns), "float32")
        with pytest.raises(ExportError, match=rf"product does not fit its weight, \[{rows + 8}, {columns}\]"):
            recipes(model, sources, Phase.MERGED)


@pytest.mark.parametrize("beyond", [-1, 32])
def test_a_trained_row_that_the_embedding_lacks_is_named(beyond: int) -> None:
    for row in (0, 31):
        model = wrapped(llama(vocab_size=32), trainable_token_indices={"embed_tokens": [1, row]})
        assert recipes_of(model, Phase.MERGED)
    model = wrapped(llama(vocab_size=32), trainable_token_indices={"embed_tokens": [1, 5]})
    model.base_model.model.model.embed_tokens.token_adapter.token_indices["default"] = [1, beyond]
    with pytest.raises(ExportError, match=rf"embed_tokens\S* trains row {beyond}, .* of 32 rows"):
        recipes_of(model, Phase.MERGED)


def test_facts_are_enough_tensors_are_not_read() -> None:
    """A sharded trainer's own parameters are no weights: with all of them on meta, recipes are the same."""
    model = wrapped(llama(), target_modules=[*TARGETS, "embed_tokens"], use_dora=True)
    sources = sources_of(model)
    mine = recipes(model, sources, Phase.MERGED)
    theirs = recipes(model.to("meta"), sources, Phase.MERGED)
    assert [(item.name, item.shape, item.sources) for item in mine] == [
        (item.name, item.shape, item.sources) for item in theirs
    ]
