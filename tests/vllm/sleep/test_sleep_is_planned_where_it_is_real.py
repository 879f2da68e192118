"""Calls are planned from facts that show a sleep which frees memory; everything else is refused by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest
from sleeping_llm import sleeping_facts

from weightlane.contexts import BuildRequestsContext, LaunchContext
from weightlane.errors import PlanError
from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, Viable
from weightlane.types import Mode, Phase, TransportName
from weightlane_vllm import server
from weightlane_vllm.eras import ERAS
from weightlane_vllm.facts import PAUSES, SLEEP_AVAILABLE, SLEEP_RECORDS
from weightlane_vllm.launch import plan_launch
from weightlane_vllm.plugin import weightlane_plan_lifecycle
from weightlane_vllm.requests import plan_lifecycle
from weightlane_vllm.sleep_calls import EngineMemory
from weightlane_vllm.sleep_plan import probe_sleep

if TYPE_CHECKING:
    from weightlane.types import RequestPolicy

BOTH = ("weights", "kv_cache")


def unasked(facts: EngineFacts, attribute: str) -> EngineFacts:
    others = {name: value for name, value in facts.attributes.items() if name != attribute}
    return msgspec.structs.replace(facts, attributes=others)


def without(facts: EngineFacts, attribute: str) -> EngineFacts:
    return msgspec.structs.replace(facts, attributes={**facts.attributes, attribute: False})


@pytest.mark.requirement("R79")
@pytest.mark.parametrize(("lora", "level", "contents"), [(False, 2, "lost"), (True, 1, "kept")])
@pytest.mark.parametrize("phase", list(Phase))
def test_the_level_follows_from_how_the_engine_was_started(
    phase: Phase, lora: bool, level: int, contents: str
) -> None:
    lifecycle = plan_lifecycle(sleeping_facts(lora=lora), phase, BOTH)
    weights, cache = lifecycle.memory
    assert (weights.tag, weights.release.route, weights.contents) == (
        "weights",
        f"release_weights_level_{level}",
        contents,
    )
    assert (cache.tag, cache.contents) == ("kv_cache", "lost")
    routes = {call.route for item in lifecycle.memory for call in (item.release, item.resume)}
    assert routes <= set(EngineMemory.ROUTES)
    assert any(f"at level {level}" in note for note in lifecycle.notes)
    assert plan_lifecycle(sleeping_facts(), phase).memory == ()


def test_what_an_older_engine_does_for_its_cache_is_told() -> None:
    lifecycle = plan_lifecycle(sleeping_facts(cache_alone=False), Phase.FULL, ["kv_cache"])
    (note,) = (note for note in lifecycle.notes if "go alone" in note)
    assert "its weights go to the host and come back" in note


def test_a_gpu_engine_in_sleep_mode_is_viable_with_what_was_seen() -> None:
    verdict = probe_sleep(sleeping_facts())
    assert isinstance(verdict, Viable)
    assert "the engine was started with --enable-sleep-mode" in verdict.evidence
    assert f"{SLEEP_RECORDS} is defined: its records tell what sleeps" in verdict.evidence


def test_an_engine_without_records_of_what_sleeps_is_watched_by_its_calls() -> None:
    verdict = probe_sleep(without(sleeping_facts(), SLEEP_RECORDS))
    assert isinstance(verdict, Viable)
    assert any("calls of sleep and wake_up are watched" in seen for seen in verdict.evidence)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (msgspec.structs.replace(sleeping_facts(), device="cpu"), "on a CPU build frees nothing"),
        (sleeping_facts(enable_sleep_mode="false"), "started without --enable-sleep-mode"),
        (sleeping_facts(sleep_mode_backend="criu"), "backend 'criu', which keeps no records"),
        (without(sleeping_facts(), SLEEP_AVAILABLE), "is_sleep_mode_available"),
        (unasked(sleeping_facts(), SLEEP_RECORDS), "nobody looked for vllm.device_allocator"),
    ],
)
def test_an_engine_that_does_not_sleep_is_refused_for_each_tag(facts: EngineFacts, reason: str) -> None:
    verdict = probe_sleep(facts)
    assert isinstance(verdict, NotViable)
    assert reason in verdict.reason
    with pytest.raises(PlanError) as caught:
        plan_lifecycle(facts, Phase.FULL, BOTH)
    assert [(item.kind, item.subject) for item in caught.value.problems] == [("release", tag) for tag in BOTH]
    assert all(reason in item.what for item in caught.value.problems)


def test_weights_without_the_cache_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r'lets its key-value cache go with them[^"]*Release "kv_cache" as well'
    ):
        plan_lifecycle(sleeping_facts(), Phase.FULL, ["weights"])


def test_the_launch_plan_asks_for_sleep_mode_where_the_lane_will_need_it() -> None:
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed", device="gpu")
    plan = plan_launch(LaunchContext(ERAS[0], facts, Mode.FULL, "/model", release=("kv_cache",)))
    assert server._parser().parse_args(plan.arguments[2:]).enable_sleep_mode
    assert any("enable_sleep_mode=True" in note for note in plan.notes)
    plan = plan_launch(LaunchContext(ERAS[0], facts, Mode.FULL, "/model"))
    assert not server._parser().parse_args(plan.arguments[2:]).enable_sleep_mode
    on_cpu = msgspec.structs.replace(facts, device="cpu")
    with pytest.raises(PlanError, match=r"\[release\] kv_cache: vLLM's sleep on a CPU build frees nothing"):
        plan_launch(LaunchContext(ERAS[0], on_cpu, Mode.FULL, "/model", release=("kv_cache",)))


@pytest.mark.parametrize(
    ("requests", "refused"), [("keep", True), ("drain", False), ("abort", False), (None, False)]
)
def test_requests_that_are_to_be_kept_stand_against_a_sleep_that_aborts_them(
    requests: RequestPolicy | None, refused: bool
) -> None:
    facts = sleeping_facts()
    running = msgspec.structs.replace(facts, attributes={**facts.attributes, PAUSES: True})
    context = BuildRequestsContext(
        descriptor=ERAS[0],
        facts=running,
        phase=Phase.FULL,
        transport=TransportName.SHM,
        tensors=(),
        buckets=(),
        workers=(),
        verify="counts",
        release=BOTH,
        requests=requests,
    )
    if refused:
        with pytest.raises(PlanError, match="vLLM's sleep aborts them"):
            weightlane_plan_lifecycle(context)
        assert weightlane_plan_lifecycle(dataclasses.replace(context, release=())).requests == "keep"
    else:
        lifecycle = weightlane_plan_lifecycle(context)
        assert [item.tag for item in lifecycle.memory] == list(BOTH)
        assert any("aborts the requests that run" in note for note in lifecycle.notes)
