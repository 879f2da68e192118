"""What a plan does with requests that run: by the engine's class, the phase, the swap and the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from weightlane.contexts import BuildRequestsContext
from weightlane.facts import EngineFacts
from weightlane.types import Phase, TransportName
from weightlane_vllm.eras import ERAS
from weightlane_vllm.facts import ENCODES, PAUSES
from weightlane_vllm.requests import FENCE_NOTE, plan_lifecycle
from weightlane_vllm.running_policy import with_running_requests

if TYPE_CHECKING:
    from weightlane.program import Lifecycle
    from weightlane.types import RequestPolicy


def context(*, pauses: bool = True, encodes: bool = False) -> BuildRequestsContext:
    facts = EngineFacts("vllm", "0.32.0", "worker", attributes={PAUSES: pauses, ENCODES: encodes})
    return BuildRequestsContext(
        descriptor=ERAS[0],
        facts=facts,
        phase=Phase.FULL,
        transport=TransportName.SHM,
        tensors=(),
        buckets=(),
        workers=(),
        verify="digest",
        drain_seconds=7.0,
    )


def planned(given: BuildRequestsContext) -> Lifecycle:
    return with_running_requests(given, plan_lifecycle(given.facts, given.phase))


def routes(lifecycle: Lifecycle) -> dict[str, list[str]]:
    calls = {
        "pause": lifecycle.pause,
        "settle": lifecycle.settle,
        "publish": lifecycle.publish,
        "resume": lifecycle.resume,
    }
    return {step: [call.route for call in of_step] for step, of_step in calls.items() if of_step}


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    ("policy", "pause", "reset"),
    [
        (None, "pause_generation:wait", "reset_prefix_cache"),
        ("drain", "pause_generation:wait", "reset_prefix_cache"),
        ("abort", "pause_generation:abort", "reset_prefix_cache"),
        ("keep", "pause_generation:keep", "reset_prefix_cache:recompute_running"),
    ],
)
def test_an_async_engine_pauses_and_empties_its_cache_after_the_commit(
    policy: RequestPolicy | None, pause: str, reset: str
) -> None:
    lifecycle = planned(replace(context(), requests=policy))
    assert routes(lifecycle) == {"pause": [pause], "publish": [reset], "resume": ["resume_generation"]}
    assert lifecycle.requests == (policy or "drain")
    assert FENCE_NOTE not in lifecycle.notes
    if pause.endswith("wait"):
        assert lifecycle.pause[0].timeout_seconds == 7.0


@pytest.mark.parametrize(("pauses", "step"), [(True, "publish"), (False, "settle")], ids=["async", "llm"])
def test_what_encoders_made_is_forgotten_where_there_are_any(pauses: bool, step: str) -> None:
    lifecycle = planned(context(pauses=pauses, encodes=True))
    assert routes(lifecycle)[step] == ["reset_prefix_cache", "reset_encoder_cache"]


def test_an_adapter_in_the_place_of_another_pauses_like_weights() -> None:
    lifecycle = planned(replace(context(), phase=Phase.ADAPTER, swap="paused"))
    assert routes(lifecycle)["pause"] == ["pause_generation:wait"]


@pytest.mark.parametrize(
    ("policy", "kept", "call"),
    [
        (None, "drain", "old_adapters:wait"),
        ("drain", "drain", "old_adapters:wait"),
        ("abort", "abort", "old_adapters:abort"),
        ("keep", "drain", "old_adapters:wait"),  # another than was asked for: the plan is refused
    ],
)
def test_an_adapter_beside_the_old_one_holds_nothing_back(
    policy: RequestPolicy | None, kept: RequestPolicy, call: str
) -> None:
    lifecycle = planned(replace(context(), phase=Phase.ADAPTER, swap="two_slot", requests=policy))
    assert routes(lifecycle) == {"pause": [call]}
    assert lifecycle.requests == kept


def test_an_llm_has_nothing_to_hold_back() -> None:
    lifecycle = planned(context(pauses=False))
    assert routes(lifecycle) == {"settle": ["reset_prefix_cache"]}
    assert lifecycle.requests == "drain"
    assert FENCE_NOTE in lifecycle.notes
