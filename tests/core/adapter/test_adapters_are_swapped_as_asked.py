"""`connect(swap=...)`: what serves, under which name, while a version is staged and after a sync failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from adapter_models import apart, engine_says, moved

from weightlane.adapters import AdapterBinding, AdapterExpression, AdapterRef
from weightlane.errors import EngineError, NotServableError, PlanError, UsageError, VerificationError
from weightlane.front import gate
from weightlane.reference.adapters import AdapterShelf
from weightlane.reference.engine import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane

both = pytest.mark.parametrize("swap", ["two_slot", "paused"])


@pytest.fixture
def engines(model_folder: str) -> tuple[ReferenceEngine, ...]:
    """Two that hold no more adapters at once than the policy needs, by its name."""
    return tuple(ReferenceEngine(model_folder, adapter_slots=2) for _ in range(2))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that waits for a staged version would wait a minute."""
    whole = gate.ServingGate.generation
    monkeypatch.setattr(gate.ServingGate, "generation", lambda self: whole(self, 0.05))


def name_of(swap: str, version: int) -> AdapterRef:
    return AdapterRef({"two_slot": f"default@{version}", "paused": "default"}[swap], version)


@both
@pytest.mark.requirement("R38")
def test_every_replica_follows_the_trainer_under_the_name_that_the_lane_tells(
    policy: Any, engines: tuple[ReferenceEngine, ...], open_lane: Callable[..., Lane], swap: str
) -> None:
    lane = open_lane(policy, *engines, swap=swap)
    assert f"adapter swap {swap}" in str(lane.plan())
    for version in (1, 2, 3):
        assert moved(policy, seed=version) >= 1e-2
        lane.sync(version)
        assert lane.adapter_ref() == name_of(swap, version)
        for replica in (0, 1):
            said = engine_says(lane, replica)
            assert apart(policy, said) <= 1e-4
            assert {item.weight_version for item in said} == {version}
    assert [len(engine._adapters._slots) for engine in engines] == [1, 1]


@both
@pytest.mark.requirement("R38")
def test_between_stage_and_commit_the_name_is_the_old_ones(
    policy: Any, engines: tuple[ReferenceEngine, ...], open_lane: Callable[..., Lane], swap: str
) -> None:
    lane = open_lane(policy, engines[0], swap=swap)
    lane.sync(1)
    before = engine_says(lane)
    moved(policy, seed=2)
    lane.stage(2)
    assert lane.adapter_ref() == name_of(swap, 1)
    if swap == "two_slot":
        assert engine_says(lane) == before
        assert lane.state.replicas[0].servable is True
    else:
        with pytest.raises(NotServableError, match="never published"):
            engine_says(lane)
        assert lane.state.replicas[0].servable is False
    lane.commit()
    assert lane.adapter_ref() == name_of(swap, 2)
    assert apart(policy, engine_says(lane)) <= 1e-4


@both
@pytest.mark.requirement("R68")
def test_after_a_failure_the_old_adapter_serves_or_nothing_does(
    policy: Any,
    engines: tuple[ReferenceEngine, ...],
    open_lane: Callable[..., Lane],
    swap: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = open_lane(policy, *engines, swap=swap)
    lane.sync(1)
    before = engine_says(lane)
    moved(policy, seed=2)
    with monkeypatch.context() as broken:
        broken.setattr(AdapterShelf, "_binding", lambda self, slot: AdapterBinding(slot.ref, ()))
        with pytest.raises(VerificationError, match="was not bound as planned") as caught:
            lane.sync(2)
    words = {
        "two_slot": "serve the adapter that they served before",
        "paused": "are fenced until a sync succeeds",
    }
    assert words[swap] in str(caught.value)
    assert lane.adapter_ref() == name_of(swap, 1)
    if swap == "two_slot":
        assert engine_says(lane) == engine_says(lane, 1) == before
    else:
        # By reference the first replica fails alone: the second has not been given its whole adapter.
        with pytest.raises(NotServableError, match=r"was not bound as planned|half-written"):
            engine_says(lane)
    lane.sync(3)
    assert apart(policy, engine_says(lane)) <= 1e-4


@pytest.mark.requirement("R37")
@pytest.mark.requirement("R38")
def test_a_request_that_names_no_adapter_or_another_is_refused_and_never_answered_by_the_base(
    policy: Any, engines: tuple[ReferenceEngine, ...], open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engines[0])
    lane.sync(1)
    with pytest.raises(EngineError, match=r"names no adapter.*default@1"):
        engine_says(lane, adapter=None)
    with pytest.raises(EngineError, match=r"no adapter 'default@7'.*It serves default@1"):
        engine_says(lane, adapter=AdapterRef("default@7", 7))


def test_control_an_engine_that_falls_back_to_its_base_is_far_from_the_trainer(
    policy: Any, engines: tuple[ReferenceEngine, ...], open_lane: Callable[..., Lane]
) -> None:
    """The rule undone (verl #7495): the base answers, and nothing says so."""
    lane = open_lane(policy, engines[0])
    lane.sync(1)
    engines[0]._adapters._serving.clear()
    said = engine_says(lane, adapter=None)
    with pytest.raises(AssertionError):
        assert apart(policy, said) <= 1e-4


# -- at plan time ---------------------------------------------------------------------------------------


def test_an_engine_with_one_slot_takes_paused_and_refuses_two_slot(
    policy: Any, model_folder: str, open_lane: Callable[..., Lane]
) -> None:
    small = ReferenceEngine(model_folder, adapter_slots=1)
    with pytest.raises(PlanError, match=r'adapter-swap.*two_slot needs 2.*started with 1.*swap="paused"'):
        open_lane(policy, small)
    lane = open_lane(policy, small, swap="paused")
    for version in (1, 2):
        moved(policy, seed=version)
        lane.sync(version)
        assert apart(policy, engine_says(lane)) <= 1e-4


def test_a_policy_for_running_requests_that_an_engine_cannot_keep_is_refused(
    policy: Any, engines: tuple[ReferenceEngine, ...], open_lane: Callable[..., Lane]
) -> None:
    with pytest.raises(PlanError, match=r"running-requests.*'abort' is asked for.*it keeps drain"):
        open_lane(policy, engines[0], requests="abort")
    assert "requests that run: drain" in str(open_lane(policy, engines[0], requests="drain").plan())


def test_an_engine_that_answers_with_another_policy_is_refused(
    policy: Any,
    engines: tuple[ReferenceEngine, ...],
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weightlane.registry import Registry

    own = AdapterExpression("paused", "{}")
    monkeypatch.setattr(Registry, "call_express_adapter", lambda self, selected, context: own)
    with pytest.raises(PlanError, match=r"swaps adapters paused, and two_slot is asked for.*swap=\"paused\""):
        open_lane(policy, engines[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "full", "swap": "paused"}, "only mode adapter moves any"),
        ({"swap": "pausd"}, "one of two_slot, paused.*Use paused"),
        ({"requests": "drian"}, "one of drain, abort, keep.*Use drain"),
    ],
)
def test_a_policy_that_means_nothing_is_refused_before_anything_is_opened(
    policy: Any, open_lane: Callable[..., Lane], arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        open_lane(policy, **arguments)


@pytest.mark.parametrize(("swap", "slots"), [("two_slot", "2"), ("paused", "1")])
def test_the_launch_command_reserves_the_slots(swap: str, slots: str) -> None:
    from weightlane.cli.launching import LaunchWish, plan_engine_launch
    from weightlane.registry import get_registry
    from weightlane.types import Mode

    wish = LaunchWish("reference", Mode.ADAPTER, None, 1, "cpu", None, "", swap=swap)  # type: ignore[arg-type]
    command = plan_engine_launch(get_registry(), wish).command
    assert command[-2:] == ("--adapter-slots", slots)
