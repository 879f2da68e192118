"""Lanes in mode adapter to live reference engines: after each sync the engine is the trainer, to 1e-4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_models import MODULES, PROMPTS, TOKENS, apart, engine_says, make_base, moved, train_step, wrapped

from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, ExportError, PlanError, SyncError, VerificationError
from weightlane.reference.adapters import AdapterShelf
from weightlane.reference.engine import ReferenceEngine
from weightlane.transports.disk import DiskSink
from weightlane.transports.inline import AgentInlineSink
from weightlane.transports.inprocess import InprocessSink
from weightlane.transports.shm import ShmSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane

SINKS = {"inprocess": InprocessSink, "inline": AgentInlineSink, "shm": ShmSink, "disk": DiskSink}
every_transport = pytest.mark.parametrize("transport", sorted(SINKS))


@every_transport
@pytest.mark.requirement("R55")
@pytest.mark.requirement("R56")
@pytest.mark.requirement("R67")
def test_ten_syncs_each_move_the_engine_to_the_trainer(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane], transport: str
) -> None:
    lane = open_lane(policy, engine, transport=transport)
    assert len(lane.plan().buckets) > 2
    with pytest.raises(SyncError, match="has not published adapter default yet"):
        lane.adapter_ref()
    for version in range(1, 11):
        assert moved(policy, seed=version) >= 1e-2
        report = lane.sync(version)
        assert f"adapter bound to {MODULES} modules on 1" in report.replicas[0].verified
        assert lane.adapter_ref() == AdapterRef(f"default@{version}", version)
        said = engine_says(lane, adapter=lane.adapter_ref())
        assert apart(policy, said) <= 1e-4
        assert {item.weight_version for item in said} == {version}
    assert len(engine._adapters._slots) == 1


@pytest.mark.requirement("R67")
def test_every_transport_carries_the_same_manifest_and_adapter(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    plans = []
    for transport in sorted(SINKS):
        with open_lane(policy, engine, transport=transport) as lane:  # one lane a name at a time
            plans.append(lane.plan())
    received = [plan.receive_plan(0, ()) for plan in plans]
    assert len({plan.replicas[0].transport for plan in plans}) == len(SINKS)
    assert all(plan.manifest == plans[0].manifest for plan in plans)
    assert all(
        (item.phase, item.adapter and item.adapter.config, item.tensors)
        == (received[0].phase, received[0].adapter and received[0].adapter.config, received[0].tensors)
        for item in received
    )
    assert received[0].adapter is not None
    assert len({item.adapter.base.identity for item in received if item.adapter}) == 1
    assert received[0].adapter.config == plans[0].manifest.adapter
    assert received[0].adapter.base.values == plans[0].manifest.base
    # Part of what sender and receiver compare before each sync.
    from msgspec.structs import replace

    stripped = replace(plans[0], manifest=replace(plans[0].manifest, adapter=None))
    assert stripped.digest() != plans[0].digest()


# -- failures -------------------------------------------------------------------------------------------


@every_transport
@pytest.mark.requirement("R68")
def test_a_sync_that_fails_half_way_leaves_the_old_adapter_serving(
    policy: Any,
    engine: ReferenceEngine,
    open_lane: Callable[..., Lane],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = open_lane(policy, engine, transport=transport)
    lane.sync(1)
    before, ref = engine_says(lane), lane.adapter_ref()
    sink: Any = SINKS[transport]
    whole = sink.put

    def put(self: Any, layout: Any, tensors: Any) -> None:
        if layout.index == 2:
            raise OSError("the cable is out")
        whole(self, layout, tensors)

    monkeypatch.setattr(sink, "put", put)
    assert moved(policy, seed=7) >= 1e-2
    with pytest.raises(SyncError, match=r"the cable is out.* serve the adapter that they served before"):
        lane.sync(2)
    assert lane.adapter_ref() == ref
    assert engine_says(lane, adapter=ref) == before
    monkeypatch.undo()
    lane.sync(3)
    assert apart(policy, engine_says(lane, adapter=lane.adapter_ref())) <= 1e-4


@pytest.mark.requirement("R68")
def test_a_binding_that_the_engine_lost_in_part_fails_and_names_the_modules(
    policy: Any, model_folder: str, open_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ReferenceEngine(model_folder)
    lane = open_lane(policy, engine)
    lane.sync(1)
    before = engine_says(lane)
    bind = AdapterShelf._binding

    def unhooked(self: AdapterShelf, slot: Any) -> Any:
        self._model.get_submodule("model.layers.1.self_attn.q_proj")._forward_hooks.clear()
        return bind(self, slot)

    with monkeypatch.context() as patched:
        patched.setattr(AdapterShelf, "_binding", unhooked)
        train_step(policy, seed=8)
        with pytest.raises(
            VerificationError, match=r"5 of 6 modules, not to model\.layers\.1\.self_attn\.q_proj"
        ):
            lane.sync(2)
    assert [item.weight_version for item in before] == [1, 1]
    assert lane.published_version == 1
    lane.sync(3)
    assert apart(policy, engine_says(lane)) <= 1e-4


@pytest.mark.requirement("R57")
@pytest.mark.requirement("R68")
def test_until_commit_the_old_adapter_answers_and_two_are_held(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engine)
    lane.sync(1)
    before, old = engine_says(lane), lane.adapter_ref()
    train_step(policy, seed=9)
    lane.stage(2)
    assert len(engine._adapters._slots) == 2
    assert engine_says(lane, adapter=old) == engine_says(lane) == before
    lane.commit()
    assert len(engine._adapters._slots) == 1
    assert apart(policy, engine_says(lane)) <= 1e-4
    with pytest.raises(EngineError, match=r"serves no adapter 'default@1'.*It serves default@2"):
        engine_says(lane, adapter=old)


def test_a_second_replica_that_fails_keeps_both_at_the_version_before(
    policy: Any, engine: ReferenceEngine, model_folder: str, open_lane: Callable[..., Lane]
) -> None:
    other = ReferenceEngine(model_folder)
    lane = open_lane(policy, engine, other)
    lane.sync(1)
    before = engine_says(lane)
    assert engine_says(lane, 1) == before
    train_step(policy, seed=10)
    other.worker.load_adapter = lambda load: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        lane.sync(2)
    assert engine_says(lane) == engine_says(lane, 1) == before
    assert len(engine._adapters._slots) == 1


# -- refused before anything moves ----------------------------------------------------------------------


@pytest.mark.usefixtures("base_stays")
def test_an_engine_with_another_base_is_refused_by_tensor(
    policy: Any, tmp_path: Any, open_lane: Callable[..., Lane]
) -> None:
    base = make_base()
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    base.save_pretrained(tmp_path)
    with pytest.raises(PlanError) as caught:
        open_lane(policy, ReferenceEngine(str(tmp_path)))
    assert [(problem.kind, problem.subject) for problem in caught.value.problems] == [
        ("residency", "model.layers.1.mlp.up_proj.weight"),
        ("residency", "base"),
    ]
    assert "phase base" in str(caught.value)


def test_a_target_that_the_engine_lacks_is_refused_by_name_with_near_ones(
    policy: Any, tmp_path: Any, open_lane: Callable[..., Lane]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict({**make_base().config.to_dict(), "num_hidden_layers": 1})
    with torch.random.fork_rng():
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PlanError) as caught:
        open_lane(policy, ReferenceEngine(str(tmp_path)))
    targets = [problem for problem in caught.value.problems if problem.kind == "adapter-target"]
    assert {problem.subject.split(".")[2] for problem in targets} == {"1"}
    assert len(targets) == MODULES // 2
    assert "model.layers.0.self_attn.q_proj" in {near for problem in targets for near in problem.near}


def test_features_that_no_adapter_carries_are_refused_at_connect(
    model_folder: str, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    model = wrapped(model_folder, use_dora=True)
    with pytest.raises(PlanError, match=r"use_dora: it is True.*Mode merged could carry it"):
        open_lane(model, engine)


def test_other_modes_have_no_adapter_to_name(engine: ReferenceEngine, open_lane: Callable[..., Lane]) -> None:
    lane = open_lane(make_base(), engine, mode="full", bucket_bytes=1 << 20)
    with pytest.raises(SyncError, match="Its mode is full"):
        lane.adapter_ref()


def test_what_changed_after_connect_is_refused_at_the_sync(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engine)
    lane.sync(1)
    before = engine_says(lane)
    policy.merge_adapter()
    with pytest.raises(ExportError, match="merged into its base weight now"):
        lane.sync(2)
    policy.unmerge_adapter()
    policy.base_model.model.model.layers[0].mlp.down_proj.set_scale("default", 3.0)
    with pytest.raises(ExportError, match=r"layers\.0\.mlp\.down_proj applies adapter default with scale 6"):
        lane.sync(3)
    assert engine_says(lane) == before


# -- beside full weights --------------------------------------------------------------------------------


@pytest.mark.usefixtures("base_stays")
def test_full_weights_replace_adapter_and_base_and_need_a_new_adapter_lane(
    policy: Any, model_folder: str, open_lane: Callable[..., Lane]
) -> None:
    engine = ReferenceEngine(model_folder)
    lane = open_lane(policy, engine)
    lane.sync(1)
    other = make_base(seed=5)
    full = open_lane(other, engine, mode="full", bucket_bytes=1 << 20)
    full.sync(7)
    said = engine_says(full)
    assert {item.weight_version for item in said} == {7}
    assert apart(other, said) <= 1e-4
    with pytest.raises(SyncError, match="does not hold the base any more"):
        lane.sync(2)
    with pytest.raises(PlanError, match="residency"):
        open_lane(policy, engine)
    assert engine_says(full) == said


def test_rank_stabilised_and_head_targets_come_out_right(
    model_folder: str, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    model = wrapped(model_folder, name="policy", use_rslora=True, target_modules=["o_proj", "lm_head"])
    lane = open_lane(model, engine, adapter="policy")
    lane.sync(1)
    assert apart(model, engine_says(lane, adapter=lane.adapter_ref())) <= 1e-4


def test_control_a_scale_taken_from_alpha_alone_is_seen(
    model_folder: str,
    engine: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an engine that ignores rank-stabilised scaling does; the parity above would not pass it."""
    import weightlane.reference.adapters as shelf

    model = wrapped(model_folder, use_rslora=True)
    lane = open_lane(model, engine)
    lane.sync(1)
    right = engine_says(lane)
    whole = shelf._delta

    def plain(load: Any, module: str, linear: Any) -> Any:
        delta = whole(load, module, linear)
        return shelf._Delta(delta.first, delta.second, delta.scaling / 2)

    monkeypatch.setattr(shelf, "_delta", plain)
    with pytest.raises(VerificationError, match="scale is 4, but the engine applies"):
        lane.sync(2)
    assert engine_says(lane) == right
    assert len(PROMPTS) * TOKENS == sum(len(item.token_ids) for item in right)
