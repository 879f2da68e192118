"""What an engine's configuration tells of its drafter, and the model of it in runners of either kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from weightlane.errors import UsageError
from weightlane.facts import EngineFacts
from weightlane.types import Phase
from weightlane_vllm.drafter import (
    Drafter,
    beyond_expected,
    draft_model_of,
    drafter_obstacle,
    drafter_of,
    drafter_policy,
    has_draft_model_getter,
)
from weightlane_vllm.requests import plan_lifecycle
from weightlane_vllm.sleep_plan import sleep_level, sleep_notes

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane_vllm.drafter import DrafterPolicy


def fake_config(method: str, drafter: str, **more: Any) -> SimpleNamespace:
    """What vLLM's configuration has of a model in /model and something that drafts for it."""
    fields = {
        "quantization": None,
        "get_num_experts": lambda: 0,
        "use_mla": False,
        "parallel_drafting": False,
    }
    fields |= more
    draft = SimpleNamespace(
        model=drafter, **{name: fields[name] for name in ("quantization", "get_num_experts", "use_mla")}
    )
    speculative = SimpleNamespace(
        method=method,
        model=drafter,
        draft_model_config=draft,
        parallel_drafting=fields["parallel_drafting"],
    )
    model = SimpleNamespace(model=fields.get("own", "/model"), model_weights=fields.get("weights", ""))
    return SimpleNamespace(speculative_config=speculative, model_config=model)


def policy_of(method: str, drafter: str, **more: Any) -> DrafterPolicy:
    policy = drafter_policy(fake_config(method, drafter, **more))
    assert policy is not None
    return policy


def test_without_a_speculative_configuration_there_is_none() -> None:
    assert drafter_policy(SimpleNamespace(speculative_config=None)) is None


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "extract_hidden_states"])
def test_one_that_looks_drafts_up_has_no_weights(method: str) -> None:
    """Their `draft_model_config` is the model's own, which says nothing."""
    policy = policy_of(method, "/model")
    assert (policy.rule, policy.told) == ("without-weights", "")
    assert drafter_obstacle(Drafter(policy, None)) == ""
    assert beyond_expected(Drafter(policy, nn.Module())) is None


@pytest.mark.parametrize(
    ("method", "drafter", "rule"),
    [
        ("mtp", "/model", "follows"),
        ("draft_model", "/model", "follows"),
        ("mtp", "/mtp-alone", "if-exported"),
        ("draft_model", "/other", "if-exported"),
        ("eagle", "/eagle", "if-exported"),
        ("eagle3", "/eagle3", "if-exported"),
    ],
)
def test_the_checkpoint_that_it_is_loaded_from_decides(method: str, drafter: str, rule: str) -> None:
    policy = policy_of(method, drafter)
    assert policy.rule == rule
    assert method in policy.told
    beyond = beyond_expected(Drafter(policy, nn.Linear(1, 1)))
    assert beyond is not None
    assert beyond.taker == f"the {method} drafter (Linear)"
    assert "WEIGHTLANE_VLLM_DRAFTER=keep" in beyond.left_out


def test_one_folder_is_one_checkpoint_however_it_is_spelt(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert policy_of("mtp", f"{real}/", own=str(link)).rule == "follows"
    assert policy_of("mtp", "s3://weights", own=str(real), weights="s3://weights").rule == "follows"
    assert policy_of("mtp", str(tmp_path), own=str(real)).rule == "if-exported"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization": "fp8"}, "it holds fp8 weights"),
        ({"get_num_experts": lambda: 8}, "it has 8 routed experts"),
        ({"use_mla": True}, "kv_b_proj"),
        ({"parallel_drafting": True}, "computed from its weights at load time"),
    ],
)
def test_one_that_plain_tensors_cannot_replace_is_refused_or_kept(
    fields: dict[str, Any], reason: str
) -> None:
    follows = Drafter(policy_of("mtp", "/model", **fields), nn.Module())
    assert reason in drafter_obstacle(follows)
    own = Drafter(policy_of("eagle", "/eagle", **fields), nn.Module())
    assert (own.policy.rule, drafter_obstacle(own)) == ("keeps", "")
    assert reason in own.policy.told
    assert beyond_expected(own) is None


def test_its_owner_may_have_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLANE_VLLM_DRAFTER", "keep")
    policy = policy_of("mtp", "/model", quantization="fp8")
    assert (policy.rule, drafter_obstacle(Drafter(policy, nn.Module()))) == ("keeps", "")
    assert "WEIGHTLANE_VLLM_DRAFTER=keep" in policy.told
    monkeypatch.setenv("WEIGHTLANE_VLLM_DRAFTER", "frozen")
    with pytest.raises(UsageError, match="auto or keep"):
        policy_of("mtp", "/model")


def test_a_proposer_of_ones_own_with_a_model_is_refused() -> None:
    policy = policy_of("custom_class", "mine.Proposer")
    assert "mine.Proposer has a model" in drafter_obstacle(Drafter(policy, nn.Module()))
    assert drafter_obstacle(Drafter(policy, None)) == ""


def test_one_that_follows_and_is_out_of_reach_is_refused() -> None:
    """As from inside vLLM's own weight transfer, which is given the model alone."""
    runner = SimpleNamespace(get_model=nn.Module)
    follows = drafter_of(SimpleNamespace(vllm_config=fake_config("mtp", "/model"), model_runner=runner))
    assert "out of reach" in drafter_obstacle(follows)
    own = drafter_of(SimpleNamespace(vllm_config=fake_config("eagle", "/eagle"), model_runner=runner))
    assert drafter_obstacle(own) == "", "nothing is written to it"


class FakeGraphWrapper:
    """As vLLM's: around the model, and gives its attributes as its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def unwrap(self) -> nn.Module:
        return self._model


def test_runners_of_either_kind_tell_its_model() -> None:
    model = nn.Linear(1, 1)
    newer = SimpleNamespace(get_draft_model=lambda: model, drafter=None)
    older = SimpleNamespace(drafter=SimpleNamespace(model=model))
    wrapped = SimpleNamespace(drafter=SimpleNamespace(model=FakeGraphWrapper(model)))
    assert [has_draft_model_getter(runner) for runner in (newer, older, wrapped)] == [True, False, False]
    assert all(draft_model_of(runner) is model for runner in (newer, older, wrapped))
    assert draft_model_of(SimpleNamespace()) is None
    assert draft_model_of(SimpleNamespace(drafter=object())) is None, "one that looks drafts up"


def facts(rule: str, told: str = "told", lora: str = "false") -> EngineFacts:
    arguments = {"drafter": rule, "drafter_told": told, "enable_lora": lora}
    return EngineFacts("vllm", "0.32.0", "worker", launch_arguments=arguments)


def test_a_plan_of_full_weights_says_what_becomes_of_it() -> None:
    assert "Speculative decoding: told." in plan_lifecycle(facts("follows"), Phase.FULL).notes
    assert "Speculative decoding: told." not in plan_lifecycle(facts("follows"), Phase.ADAPTER).notes
    assert not [note for note in plan_lifecycle(facts("", ""), Phase.FULL).notes if "Specul" in note]


@pytest.mark.parametrize(("rule", "level"), [("follows", 2), ("keeps", 1), ("if-exported", 1)])
def test_weights_that_no_sync_writes_are_not_let_go_without_a_copy(rule: str, level: int) -> None:
    assert sleep_level(facts(rule)) == level
    (note, *_) = sleep_notes(facts(rule), ("weights", "kv_cache"))
    assert ("the drafter's are weights too" in note) == (level == 1)
    (note, *_) = sleep_notes(facts(rule, lora="true"), ("weights", "kv_cache"))
    assert "LoRA slots" in note
