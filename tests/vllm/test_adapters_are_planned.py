"""What vLLM is launched for, which adapters it takes, and in which form."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.contexts import ExpressAdapterContext, LaunchContext
from weightlane.errors import PlanError
from weightlane.facts import EngineFacts
from weightlane.peft import ModuleLora, adapter_of_modules
from weightlane.types import Mode
from weightlane_vllm.adapter_expression import express
from weightlane_vllm.eras import ERAS
from weightlane_vllm.facts import LORA_PATTERNS
from weightlane_vllm.launch import plan_launch
from weightlane_vllm.server import _parser

MODULE, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
PLAIN = adapter_of_modules("default", {MODULE: ModuleLora(8, 16.0), OTHER: ModuleLora(8, 16.0)})
OWN_SCALE = adapter_of_modules("default", {MODULE: ModuleLora(8, 16.0), OTHER: ModuleLora(8, 8.0)})


def facts(*, patterns: bool = True, **arguments: str) -> EngineFacts:
    launched = {"enable_lora": "true", "max_loras": "2", "max_lora_rank": "8", "fully_sharded_loras": "false"}
    return EngineFacts(
        engine="vllm",
        version="0.32.0",
        source="worker",
        attributes={LORA_PATTERNS: patterns},
        launch_arguments={**launched, **arguments},
    )


def context(found: EngineFacts, adapter: Any = PLAIN, swap: Any = "two_slot") -> ExpressAdapterContext:
    return ExpressAdapterContext(ERAS[0], found, adapter, (), swap)


@pytest.mark.parametrize(
    ("arguments", "swap", "words"),
    [
        ({"enable_lora": "false"}, "two_slot", "started without LoRA"),
        (
            {"max_loras": "1"},
            "two_slot",
            "swap two_slot needs 2 LoRA slots, and the engine was started with 1",
        ),
        ({"max_lora_rank": "1"}, "paused", "launched for 1 at most"),
        ({"fully_sharded_loras": "true"}, "paused", "shards both matrices"),
    ],
)
def test_what_an_engine_was_not_launched_for_is_refused(
    arguments: dict[str, str], swap: str, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        express(context(facts(**arguments), swap=swap))


def test_everything_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(PlanError) as refused:
        express(context(facts(max_loras="1", max_lora_rank="1")))
    assert {problem.subject for problem in refused.value.problems} == {"r", "max_loras"}


@pytest.mark.parametrize("swap", ["two_slot", "paused"])
def test_either_policy_is_kept(swap: str) -> None:
    assert express(context(facts(), swap=swap)).swap == swap


def test_one_slot_is_enough_where_generation_is_paused() -> None:
    assert express(context(facts(max_loras="1"), swap="paused")).swap == "paused"


@pytest.mark.parametrize(
    ("patterns", "adapter", "form"),
    [
        (True, OWN_SCALE, "as-trained"),
        (False, OWN_SCALE, "normal"),
        (False, PLAIN, "as-trained"),
    ],
)
def test_an_engine_that_ignores_scales_of_modules_is_sent_the_normal_form(
    patterns: bool, adapter: Any, form: str
) -> None:
    expression = express(context(facts(patterns=patterns), adapter))
    assert expression.form == form
    assert bool(expression.carries) is patterns


def launched(rank: int, swap: Any = "two_slot") -> Any:
    installed = EngineFacts(engine="vllm", version="0.32.0", source="installed", device="cpu")
    return plan_launch(LaunchContext(ERAS[0], installed, Mode.ADAPTER, "/model", swap=swap, lora_rank=rank))


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(("rank", "allowed"), [(4, 8), (8, 8), (33, 64), (0, 16)])
@pytest.mark.parametrize(("swap", "slots"), [("two_slot", 2), ("paused", 1)])
def test_the_launch_has_slots_for_the_policy_and_the_next_allowed_rank(
    rank: int, allowed: int, swap: str, slots: int
) -> None:
    plan = launched(rank, swap)
    options = _parser().parse_args(plan.arguments[2:])
    assert (options.enable_lora, options.max_loras, options.max_lora_rank) == (True, slots, allowed)
    assert any(f"max_loras={slots}, max_lora_rank={allowed}" in note for note in plan.notes)
    assert any("no rank was told" in note for note in plan.notes) is (rank == 0)


def test_a_rank_beyond_all_is_no_launch() -> None:
    with pytest.raises(PlanError, match="the rank is 513, and vLLM takes 512 at most"):
        launched(513)
