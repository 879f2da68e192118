"""Lanes in mode merged to a reference engine: its log-probs are the trainer's after each sync, to 1e-5."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from export_models import llama, made, merged_by_peft, quiet, same, state_of, step, wrapped

import weightlane as wl
from weightlane.errors import ExportError, PlanError, SyncError
from weightlane.lane_messages import SyncReport
from weightlane.messages import decode, encode
from weightlane.reference.engine import ReferenceEngine
from weightlane.testing.greedy import greedy_choices
from weightlane.testing.ranks import _free_port
from weightlane.torch_trainer import exported
from weightlane.types import Phase

if TYPE_CHECKING:
    from weightlane.lane import Lane

PROMPTS = ([1, 2, 3], [7, 11, 13])
TOKENS = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ReferenceEngine:
    folder = tmp_path_factory.mktemp("export") / "model"
    llama(initializer_range=0.2).save_pretrained(folder)
    return ReferenceEngine(str(folder))


def lane_of(model: Any, engine: ReferenceEngine, mode: str = "merged", **options: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=model, **options),
        rollout=[wl.rollout("reference", engine=engine)],
        mode=mode,  # type: ignore[arg-type]
        bucket_bytes=8192,
        control=f"tcp://127.0.0.1:{_free_port()}",
    )


def apart(model: Any, lane: Lane) -> float:
    """How far the engine's log-probs are from the model's, whose greedy tokens its tokens must be."""
    said = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS)
    mine = greedy_choices(model, PROMPTS, [item.token_ids for item in said])
    assert [item.token_ids for item in mine] == [item.token_ids for item in said]
    pairs = zip(mine, said, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True))


@pytest.fixture
def policy() -> Any:
    return wrapped(llama(initializer_range=0.2), modules_to_save=["lm_head"], use_dora=True)


@pytest.mark.requirement("R1")
@pytest.mark.requirement("R5")
@pytest.mark.requirement("R10")
def test_each_sync_brings_the_engine_to_the_trainer(policy: Any, engine: ReferenceEngine) -> None:
    with lane_of(policy, engine) as lane:
        plan = lane.plan()
        assert (plan.manifest.phase.value, plan.manifest.adapter) == ("merged", None)
        for version in (1, 2):
            step(policy, seed=version)
            before = state_of(policy)
            lane.sync(version)
            assert apart(policy, lane) <= 1e-5
            assert same(state_of(policy), before)
        step(policy, seed=9)
        with pytest.raises(AssertionError):  # the control: without a sync the engine is behind
            assert apart(policy, lane) <= 1e-5


def test_the_stale_bug_would_show(
    policy: Any, engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the base sent in place of merged weights, as the bug did, log-probs are apart."""
    with lane_of(policy, engine) as lane:
        whole = exported.recipes
        monkeypatch.setattr(
            exported,
            "recipes",
            lambda model, sources, phase, adapter: whole(model, sources, wl_base(phase), adapter),
        )
        lane.sync(1)
        monkeypatch.undo()
        with pytest.raises(AssertionError):
            assert apart(policy, lane) <= 1e-2
        lane.sync(2)
        assert apart(policy, lane) <= 1e-5


def reports_of(model: Any, engine: ReferenceEngine, mode: str = "merged") -> list[SyncReport]:
    with lane_of(model, engine, mode) as lane:
        return [lane.sync(version) for version in (1, 2)]


def test_a_report_tells_what_rounding_took_from_the_adapters_change(engine: ReferenceEngine) -> None:
    """Against the same share worked out from peft's own merge of a float32 copy."""
    policy = wrapped(llama(torch.bfloat16))
    exact = merged_by_peft(copy.deepcopy(policy).float())
    base = {name: tensor.float() for name, tensor in made(policy, Phase.BASE).items()}
    changed = [name for name in base if not torch.equal(base[name], exact[name])]
    lost = torch.cat([(exact[name] - exact[name].bfloat16().float()).flatten() for name in changed])
    meant = torch.cat([(exact[name] - base[name]).flatten() for name in changed])
    wanted = float(lost.norm() / meant.norm())
    assert 1e-4 < wanted < 0.2
    for report in reports_of(policy, engine):
        assert report.update_lost == pytest.approx(wanted, rel=1e-3)
        assert msgspec.json.decode(msgspec.json.encode(report))["update_lost"] == report.update_lost
        assert decode(encode(report), SyncReport, sender="rank 0") == report


def test_control_nothing_is_lost_where_nothing_is_rounded_and_none_told_where_nothing_is_merged(
    engine: ReferenceEngine,
) -> None:
    assert {report.update_lost for report in reports_of(wrapped(llama()), engine)} == {0.0}
    assert {report.update_lost for report in reports_of(wrapped(llama()), engine, "adapter")} == {None}
    assert {report.update_lost for report in reports_of(llama(torch.bfloat16), engine, "full")} == {None}


def test_a_change_that_is_too_small_for_the_dtype_is_lost_and_told(engine: ReferenceEngine) -> None:
    policy = wrapped(llama(torch.bfloat16))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(1e-4)
    assert reports_of(policy, engine)[0].update_lost > 0.9  # type: ignore[operator]


def wl_base(phase: Any) -> Any:
    assert phase is Phase.MERGED
    return Phase.BASE


def test_the_named_adapter_is_served_and_not_the_active_one(engine: ReferenceEngine) -> None:
    from peft import LoraConfig

    model = wrapped(llama(initializer_range=0.2), "policy")
    with quiet():
        model.add_adapter("critic", LoraConfig(r=2, target_modules=["q_proj"]))
    step(model, seed=2)
    model.set_adapter("critic")
    with lane_of(model, engine, adapter="policy") as lane:
        lane.sync(1)
        with pytest.raises(AssertionError):
            assert apart(model, lane) <= 1e-5
        model.set_adapter("policy")
        assert apart(model, lane) <= 1e-5


def test_an_adapter_merged_into_the_live_base_fails_the_sync_and_the_engine_keeps_its_version(
    policy: Any, engine: ReferenceEngine
) -> None:
    with lane_of(policy, engine) as lane:
        lane.sync(1)
        said = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS)
        with quiet():
            policy.merge_adapter()
        with pytest.raises(ExportError, match="merged into its base weight now"):
            lane.sync(2)
        assert lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS) == said
        with quiet():
            policy.unmerge_adapter()


def test_mode_full_of_a_wrapped_model_names_the_modes_that_serve_it(
    policy: Any, engine: ReferenceEngine
) -> None:
    with pytest.raises(ExportError, match="Use mode merged"):
        lane_of(policy, engine, "full")


def test_a_head_that_an_adapter_unties_is_refused_by_an_engine_that_ties_it(tmp_path: Any) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    engine = ReferenceEngine(str(tmp_path))
    with lane_of(wrapped(llama(tie_word_embeddings=True)), engine) as lane:
        lane.sync(1)
    untied = wrapped(llama(tie_word_embeddings=True), modules_to_save=["lm_head"])
    with pytest.raises(PlanError, match=r"\[tied\] lm_head\.weight: .*holds it as a tensor of its own"):
        lane_of(untied, engine)


def test_training_while_buckets_travel_fails_the_sync(
    policy: Any, engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.transports.inprocess import InprocessSink

    whole = InprocessSink.put

    def put(self: Any, layout: Any, tensors: Any) -> None:
        if layout.index == 1:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.5)
        whole(self, layout, tensors)

    with lane_of(policy, engine) as lane:
        lane.sync(1)
        monkeypatch.setattr(InprocessSink, "put", put)
        with pytest.raises((ExportError, SyncError), match="was changed while its version was exported"):
            lane.sync(2)
        monkeypatch.undo()
        lane.sync(3)
        assert apart(policy, lane) <= 1e-5
