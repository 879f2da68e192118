"""An engine that does not carry a feature is told to the user with a mode, and that mode really serves it."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import gpt2, llama, made, quiet, qwen3_moe, recipes_of, wrapped

from weightlane.errors import ExportError, PlanError
from weightlane.peft.declared import read_declaration
from weightlane.peft.features import FEATURES, IN_TRAINER, MERGED, refused_features, unknown_fields
from weightlane.torch_trainer.adapter import require_plain_base
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOKENS = torch.arange(8).view(1, 8)
BLOCKS = {"target_modules_bd_a": ["q_proj", "v_proj"], "target_modules_bd_b": ["down_proj"], "nblocks": 2}


@dataclass(frozen=True)
class Asked:
    """How a model comes to have the feature; `config` is peft's own class for its value, by name."""

    value: Any = None
    config: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], Any] = llama
    beside: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1


ASKED: dict[str, Asked] = {
    "rank_pattern": Asked({"q_proj": 2}),
    "alpha_pattern": Asked({"q_proj": 3}),
    "bias": Asked("lora_only", make=lambda: llama(attention_bias=True)),
    "lora_bias": Asked(True, make=lambda: llama(attention_bias=True), beside={"target_modules": ["q_proj"]}),
    "use_dora": Asked(True),
    "modules_to_save": Asked(["lm_head"]),
    "target_parameters": Asked(["mlp.experts.gate_up_proj"], make=qwen3_moe),
    "trainable_token_indices": Asked([1, 2]),
    "fan_in_fan_out": Asked(True, make=gpt2, beside={"target_modules": ["c_attn"]}),
    "init_lora_weights": Asked("pissa"),
    "layer_replication": Asked([(0, 1), (0, 1)], layers=2),
    "use_qalora": Asked(True),
    "use_bdlora": Asked(config="BdLoraConfig", given=BLOCKS),
    "alora_invocation_tokens": Asked([1]),
    "arrow_config": Asked(config="ArrowConfig"),
    "velora_config": Asked(config="VeloraConfig"),
    "monteclora_config": Asked(config="MontecloraConfig"),
    "kasa_config": Asked(config="KasaConfig"),
    "ensure_weight_tying": Asked(True),
}
OTHER_FORMS = ("target_parameters", "fan_in_fan_out")
"""Their checkpoint is no state dict of a plain `llama`."""


def trained_with(feature: str) -> Any:
    from peft import LoraConfig
    from peft.tuners.lora import config as configs

    if feature not in {item.name for item in fields(LoraConfig)}:
        pytest.skip(f"this peft has no {feature}")
    asked = ASKED[feature]
    value = getattr(configs, asked.config)(**asked.given) if asked.config else asked.value
    return wrapped(asked.make(), **{feature: value}, **asked.beside)


def advice(feature: str) -> str:
    (problem,) = refused_features({feature: "asked"}, (), receiver="the engine")
    return problem.fix


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def exported_as_told(model: Any, told: str) -> dict[str, torch.Tensor]:
    """In the mode that the text names; ExportError where that refuses."""
    (mode,) = re.findall(r"[Mm]ode (\w+) could carry it", told)
    if mode == "merged":
        return made(model, Phase.MERGED)
    assert mode == "full"
    with quiet():
        model = copy.deepcopy(model).merge_and_unload() if "merge_and_unload" in told else model
    return made(model, Phase.FULL)


def test_every_feature_of_the_table_is_tried() -> None:
    assert ASKED.keys() == FEATURES.keys()


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("feature", [name for name in FEATURES if "No mode" not in FEATURES[name].mode])
def test_the_mode_accepts_it_and_says_what_the_trainer_says(feature: str) -> None:
    model = trained_with(feature)
    exported = exported_as_told(model, advice(feature))
    if feature in OTHER_FORMS:
        return
    engine = llama(
        num_hidden_layers=ASKED[feature].layers, attention_bias="q_proj.bias" in str(list(exported))
    )
    engine.load_state_dict(exported)
    torch.testing.assert_close(logits(engine), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("feature", [name for name in FEATURES if FEATURES[name].mode == IN_TRAINER])
def test_control_where_the_trainer_has_to_merge_mode_merged_refuses(feature: str) -> None:
    """So that the text this table once had, which named mode merged, is seen to be wrong."""
    model = trained_with(feature)
    with pytest.raises(ExportError, match=r"of the kind \w+\. How it changes the weight is not known here"):
        exported_as_told(model, MERGED)


def test_control_a_replicated_layer_is_none_that_mode_full_takes() -> None:
    model = trained_with("layer_replication")
    with pytest.raises(ExportError, match="is a layer of peft's"):
        recipes_of(model, Phase.FULL)
    # Merged by peft the layers that share a weight also share what was added to it.
    engine = llama(num_hidden_layers=2)
    engine.load_state_dict(exported_as_told(model, IN_TRAINER))
    assert float((logits(engine) - logits(model)).abs().max()) > 1e-2


@pytest.mark.parametrize("feature", [name for name in FEATURES if "No mode" in FEATURES[name].mode])
def test_what_no_mode_carries_names_none(feature: str) -> None:
    assert not re.findall(r"[Mm]ode (merged|full|adapter)", advice(feature))


def test_what_nobody_here_knows_is_never_said_to_be_merged_here() -> None:
    """A later peft's own way of merging may be another; what it merged itself are weights as any."""
    (unknown,) = unknown_fields({"use_newlora": True})
    assert unknown.fix.endswith(IN_TRAINER)
    assert advice("newlora") == IN_TRAINER
    _, problems = read_declaration(
        {"peft_type": "IA3", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    )
    assert [problem.fix for problem in problems if problem.subject == "peft_type"] == [IN_TRAINER]


def test_another_kind_of_adapter_that_its_trainer_merged_goes_in_mode_full() -> None:
    from peft import IA3Config, get_peft_model

    with quiet():
        model: Any = get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises((ExportError, PlanError)):
        exported_as_told(model, MERGED)
    engine = llama()
    engine.load_state_dict(exported_as_told(model, IN_TRAINER))
    torch.testing.assert_close(logits(engine), logits(model), rtol=0, atol=1e-5)


def test_a_base_that_is_trained_under_its_adapter_goes_in_the_mode_that_its_refusal_names() -> None:
    model = wrapped(llama())
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ExportError, match="parameters of the base are trained") as caught:
        require_plain_base(model)
    (mode,) = re.findall(r"use mode (\w+)", str(caught.value))
    assert made(model, Phase(mode))
    with pytest.raises(ExportError):
        made(model, Phase.FULL)
