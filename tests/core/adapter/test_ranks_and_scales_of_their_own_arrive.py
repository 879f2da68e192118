"""Ranks and scales per module reach the reference engine as they were trained, and in the normal form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_models import MODULES, apart, engine_says, moved, wrapped
from msgspec.structs import replace

from weightlane.errors import ExportError, PlanError, VerificationError
from weightlane.normal_stream import NormalFormStream
from weightlane.peft import adapter_of_modules
from weightlane.reference import expression
from weightlane.reference.engine import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane

OWN = {
    "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 6, "down_proj": 2},
    "alpha_pattern": {"v_proj": 12, r"layers\.1\.mlp\.down_proj": 3},
    "use_rslora": True,
}
GROUPS = (("q_proj", "k_proj", "v_proj"),)
RANKS = {"layers.0.self_attn.q_proj": 6, "layers.0.mlp.down_proj": 2, "layers.1.self_attn.v_proj": 4}


@pytest.fixture
def patterned(model_folder: str) -> Any:
    return wrapped(model_folder, **OWN)


def wants_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference engine as one that ignores patterns and takes whole groups."""
    whole = expression.express

    def express(config: Any) -> Any:
        return replace(whole(config), form="normal", carries=(), groups=GROUPS)

    monkeypatch.setattr(expression, "express", express)


def scales_of(model: Any) -> dict[str, float]:
    return {
        path.removeprefix("base_model.model.model."): float(layer.scaling["default"])
        for path, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def test_as_trained_each_module_has_its_own_and_nothing_is_padded(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(patterned, engine)
    plan = lane.plan()
    config = plan.manifest.adapter
    assert config is not None
    assert plan.manifest.trained is None
    assert {name: config.lora_of(f"model.{name}").rank for name in RANKS} == RANKS
    assert set(config.needs) == {"rank_pattern", "alpha_pattern"}
    assert "of them with a rank or scale of their own" in str(plan)
    for version in (1, 2):
        assert moved(patterned, seed=version) >= 1e-2
        report = lane.sync(version)
        assert f"adapter bound to {MODULES} modules on 1" in report.replicas[0].verified
        assert apart(patterned, engine_says(lane, adapter=lane.adapter_ref())) <= 1e-4
    bound = engine._adapters._slots.values()
    assert {d.first.shape[0] for slot in bound for d in slot.deltas.values()} == {2, 4, 6}
    assert {
        live.removeprefix("model."): pytest.approx(delta.scaling)
        for slot in bound
        for live, delta in slot.deltas.items()
    } == scales_of(patterned)


@pytest.mark.parametrize("transport", ["inprocess", "shm"])
def test_in_normal_form_one_rank_and_whole_groups_say_the_same(
    patterned: Any,
    engine: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    wants_normal(monkeypatch)
    lane = open_lane(patterned, engine, transport=transport)
    plan = lane.plan()
    config, trained = plan.manifest.adapter, plan.manifest.trained
    assert config is not None
    assert trained is not None
    assert (config.rank, config.scaling, config.own, config.needs) == (6, 1.0, {}, {})
    assert len(trained.tensors) == 2 * MODULES
    assert len(plan.tensors) == 2 * MODULES + 4  # k_proj of both layers, all zeros
    assert {min(tensor.shape) for tensor in plan.tensors} == {6}
    assert plan.replicas[0].adapter is not None
    assert plan.replicas[0].adapter.form == "normal"
    assert '"rank_pattern"' not in plan.replicas[0].adapter.wire
    assert "adapter swap two_slot, form normal" in str(plan)
    for version in (1, 2):
        assert moved(patterned, seed=version) >= 1e-2
        lane.sync(version)
        assert apart(patterned, engine_says(lane, adapter=lane.adapter_ref())) <= 1e-4
    assert {d.first.shape[0] for s in engine._adapters._slots.values() for d in s.deltas.values()} == {6}


def test_one_replica_that_needs_the_normal_form_has_the_whole_lane_take_it(
    patterned: Any,
    engine: ReferenceEngine,
    model_folder: str,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([False, True, False, True] * 9)
    whole = expression.express

    def express(config: Any) -> Any:
        told = whole(config)
        return replace(told, form="normal", carries=()) if next(answers) else told

    monkeypatch.setattr(expression, "express", express)
    lane = open_lane(patterned, engine, ReferenceEngine(model_folder))
    assert [item.adapter.form for item in lane.plan().replicas if item.adapter] == ["normal", "normal"]
    lane.sync(1)
    said = [engine_says(lane, number, adapter=lane.adapter_ref()) for number in (0, 1)]
    assert said[0] == said[1]
    assert apart(patterned, said[0]) <= 1e-4


# -- the checks can fail --------------------------------------------------------------------------------


def test_control_a_form_that_folds_no_scale_says_something_else(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    import weightlane.normal_stream as stream

    wants_normal(monkeypatch)
    whole = stream.transforms

    def unfolded(*given: Any) -> Any:
        from dataclasses import replace as changed

        return tuple(changed(change, factor=1.0) for change in whole(*given))

    monkeypatch.setattr(stream, "transforms", unfolded)
    lane = open_lane(patterned, engine)
    lane.sync(1)
    with pytest.raises(AssertionError):
        assert apart(patterned, engine_says(lane)) <= 1e-4


def test_control_an_engine_that_applies_one_scale_to_all_is_seen(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    import weightlane.reference.adapters as shelf

    lane = open_lane(patterned, engine)
    whole = shelf._delta

    def plain(load: Any, module: str, linear: Any) -> Any:
        delta = whole(load, module, linear)
        return shelf._Delta(delta.first, delta.second, load.config.scaling)

    monkeypatch.setattr(shelf, "_delta", plain)
    with pytest.raises(
        VerificationError, match=r"the engine applies model\.layers\.0\.self_attn\.v_proj .* \(not "
    ):
        lane.sync(1)


def test_a_stream_that_leaves_a_tensor_out_is_an_error_that_names_it(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants_normal(monkeypatch)
    lane = open_lane(patterned, engine)
    made = NormalFormStream._made
    monkeypatch.setattr(NormalFormStream, "_made", lambda self, held, numbers: made(self, {}, numbers))
    with pytest.raises(
        ExportError, match=r"yielded no base_model\.model\.model\.layers\.0\..*lora_A\.weight"
    ):
        lane.sync(1)


def test_a_layer_whose_scale_was_changed_is_refused_whatever_the_form(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants_normal(monkeypatch)
    lane = open_lane(patterned, engine)
    patterned.base_model.model.model.layers[1].mlp.down_proj.set_scale("default", 3.0)
    with pytest.raises(ExportError, match=r"layers\.1\.mlp\.down_proj applies adapter default with scale"):
        lane.sync(1)


# -- refused by what the engine carries -----------------------------------------------------------------


@pytest.mark.requirement("R29")
def test_features_are_refused_by_what_the_engine_says_that_it_carries(
    model_folder: str,
    engine: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same adapter is taken by an engine that carries its features and refused by one that does not."""
    model = wrapped(model_folder, **OWN)
    whole = expression.express
    monkeypatch.setattr(
        expression, "express", lambda config: replace(whole(config), carries=("rank_pattern",))
    )
    with pytest.raises(PlanError) as caught:
        open_lane(model, engine)
    assert [(problem.kind, problem.subject) for problem in caught.value.problems] == [
        ("peft-config", "alpha_pattern")
    ]
    assert "alphas" in caught.value.problems[0].what
    assert "which reference at" in caught.value.problems[0].what
    monkeypatch.undo()
    dora = wrapped(model_folder, use_dora=True)
    with pytest.raises(
        PlanError, match=r"use_dora: it is True: .* reference at .* does not carry.*Mode merged"
    ):
        open_lane(dora, engine)
    monkeypatch.setattr(expression, "express", lambda config: replace(whole(config), carries=("use_dora",)))
    open_lane(dora, engine).close()
    monkeypatch.undo()
    saved = wrapped(model_folder, modules_to_save=["lm_head"])
    saved.requires_grad_(requires_grad=False)
    with pytest.raises(PlanError, match=r"modules_to_save: it is \['lm_head'\].*does not carry.*Mode merged"):
        open_lane(saved, engine)


def test_what_is_refused_by_the_plan_is_refused_by_the_worker_too(patterned: Any) -> None:
    from fake_adapter_engine import CONFIG, FakeAdapterEngine, attached, plan

    asked = plan()
    assert asked.adapter is not None
    config = adapter_of_modules(CONFIG.name, CONFIG.modules, {"use_dora": "True"})
    with pytest.raises(PlanError, match=r"use_dora: it is True"):
        attached(FakeAdapterEngine(), replace(asked, adapter=replace(asked.adapter, config=config)))
    rankless = replace(CONFIG, rank=0)
    with pytest.raises(PlanError, match=r"\[adapter-config\].* no rank"):
        attached(FakeAdapterEngine(), replace(asked, adapter=replace(asked.adapter, config=rankless)))


def test_the_trainer_s_own_matrices_stay_as_they_are(
    patterned: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants_normal(monkeypatch)
    before = {name: parameter.detach().clone() for name, parameter in patterned.named_parameters()}
    lane = open_lane(patterned, engine)
    lane.sync(1)
    assert all(torch.equal(parameter, before[name]) for name, parameter in patterned.named_parameters())
