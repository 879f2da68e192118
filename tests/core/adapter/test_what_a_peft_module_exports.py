"""The torch trainer in mode adapter: the live matrices of one adapter, on a base that stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_models import MODULES, TARGETS, make_base, train_step, wrapped

from weightlane.base_digest import value_digests
from weightlane.contexts import ExportContext, PeftConfigContext
from weightlane.errors import ExportError
from weightlane.manifest import RankManifest, merge_rank_manifests
from weightlane.torch_trainer.adapter import adapter_config, adapter_tensors, base_tensors
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.plugin import TORCH
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.peft import AdapterConfig


def export(model: Any, rank: int = 0, world_size: int = 1, **options: Any) -> ExportContext:
    return ExportContext(TORCH, model, Phase.ADAPTER, rank, world_size, options)


def config_of(context: ExportContext) -> AdapterConfig:
    return adapter_config(PeftConfigContext(TORCH, context, describe(context).tensors))


def told(context: ExportContext) -> RankManifest:
    from msgspec.structs import replace

    part = describe(context)
    return part if context.model is None else replace(part, adapter=config_of(context))


def test_only_lora_tensors_are_described_and_the_base_by_digest(model_folder: str, policy: Any) -> None:
    part = describe(export(policy))
    assert len(part.tensors) == 2 * MODULES
    assert {spec.name.split(".lora_")[0].split(".")[-1] for spec in part.tensors} == set(TARGETS)
    assert not [spec.name for spec in part.tensors if "default" in spec.name or "base_layer" in spec.name]
    assert part.base == value_digests(make_base().state_dict())
    assert config_of(export(policy)).target_modules == tuple(
        dict.fromkeys(spec.name.split(".lora_")[0].removeprefix("base_model.model.") for spec in part.tensors)
    )


def test_layers_put_in_without_the_wrapper_export_the_same(policy: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    plain = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS)), make_base())
    plain.peft_config = policy.peft_config
    context = export(plain.requires_grad_(False))
    assert set(adapter_tensors(context)) == set(adapter_tensors(export(policy)))
    assert set(base_tensors(context)) == set(base_tensors(export(policy)))


def test_training_moves_the_export_and_not_the_base(policy: Any) -> None:
    before = {name: tensor.clone() for name, tensor in adapter_tensors(export(policy)).items()}
    digests = describe(export(policy)).base
    train_step(policy, seed=3)
    now = adapter_tensors(export(policy))
    assert not any(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert describe(export(policy)).base == digests


def test_one_of_several_adapters_is_named_or_nothing_is_sent(policy: Any) -> None:
    from peft import LoraConfig

    policy.add_adapter("critic", LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"]))
    with pytest.raises(ExportError, match="has 2 adapters: default, critic"):
        describe(export(policy))
    assert len(describe(export(policy, adapter="critic")).tensors) == 4
    assert len(describe(export(policy, adapter="default")).tensors) == 2 * MODULES
    assert config_of(export(policy, adapter="critic")).rank == 2
    with pytest.raises(ExportError, match=r"no adapter 'critics'.*Use 'critic'"):
        describe(export(policy, adapter="critics"))


@pytest.mark.parametrize("model", [make_base, dict])
def test_a_model_without_an_adapter_is_refused(model: Callable[[], Any]) -> None:
    with pytest.raises(ExportError, match=r"has no adapter\..*use mode full"):
        describe(export(model()))


def test_an_adapter_option_in_another_mode_is_refused() -> None:
    with pytest.raises(ExportError, match="An adapter is named in modes adapter and merged alone"):
        describe(ExportContext(TORCH, make_base(), Phase.FULL, 0, 1, {"adapter": "default"}))


def test_a_base_that_trains_is_refused_by_name(policy: Any) -> None:
    policy.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(
        ExportError, match=r"model\.norm\.weight and 0 more parameters of the base are trained"
    ):
        describe(export(policy))


def test_a_merged_adapter_is_refused_while_it_is_merged(policy: Any) -> None:
    policy.merge_adapter()
    with pytest.raises(ExportError, match="has adapter default merged into its base weight now"):
        adapter_tensors(export(policy))
    policy.unmerge_adapter()
    assert adapter_tensors(export(policy))


def test_a_layer_with_a_scale_of_its_own_is_refused(policy: Any) -> None:
    layer = policy.base_model.model.model.layers[1].self_attn.v_proj
    layer.set_scale("default", 0.5)
    with pytest.raises(ExportError, match=r"layers\.1\.self_attn\.v_proj applies .* with scale 1; .* says 2"):
        config_of(export(policy))


def test_an_adapter_is_refused_while_another_is_merged_into_the_base(policy: Any) -> None:
    from peft import LoraConfig

    policy.add_adapter("other", LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head"]))
    assert adapter_tensors(export(policy, adapter="default"))
    policy.merge_adapter(["other"])  # a layer that the exported adapter has no part in
    with pytest.raises(ExportError, match=r"lm_head has adapter other merged into its base weight now"):
        adapter_tensors(export(policy, adapter="default"))


@pytest.mark.requirement("R67")
def test_ranks_agree_on_one_adapter_or_every_difference_is_told(model_folder: str, policy: Any) -> None:
    mine = told(export(policy, 0, 2, placement="partitioned"))
    nothing = told(export(None, 1, 2, placement="partitioned"))
    manifest, problems = merge_rank_manifests([mine, nothing])
    assert manifest is not None, problems
    assert (manifest.adapter, manifest.base, manifest.phase) == (mine.adapter, mine.base, Phase.ADAPTER)

    other = wrapped(model_folder, lora_alpha=16)
    with torch.no_grad():
        other.base_model.model.lm_head.weight.mul_(2)
    _, problems = merge_rank_manifests([told(export(policy, 0, 2)), told(export(other, 1, 2))])
    assert [(problem.kind, problem.subject) for problem in problems] == [
        ("rank-disagreement", "adapter default"),
        ("rank-disagreement", "lm_head.weight"),
    ]
    _, problems = merge_rank_manifests([nothing])
    assert "adapter" in {problem.subject for problem in problems}
