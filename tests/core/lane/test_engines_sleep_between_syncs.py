"""A lane that manages its engines' memory: what it releases it takes back, in the schedule's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_engines import (
    PROMPT,
    FakeForgetfulWorker,
    change,
    engines,
    held_equal,
    lane_to,
    versions_held,
    weights_of,
)
from msgspec.structs import replace

import weightlane as wl
from weightlane.errors import EngineError, NotServableError, SyncError, VerificationError
from weightlane.hookspecs import hookimpl
from weightlane.program import EngineCall, Lifecycle
from weightlane.reference import plugin
from weightlane.registry import Registry, get_registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from local_engines import FakeMortalEngine
    from torch import Tensor

    from weightlane.contexts import BuildRequestsContext

BOTH = ("weights", "kv_cache")


@pytest.fixture
def pair(model_folder: Path) -> list[FakeMortalEngine]:
    return engines(model_folder)


@pytest.fixture
def weights(model_folder: Path) -> dict[str, Tensor]:
    return weights_of(model_folder)


def released(pair: list[FakeMortalEngine]) -> list[tuple[str, ...]]:
    return [engine.memory.released for engine in pair]


@pytest.mark.requirement("R79")
def test_the_policy_is_in_the_plan_before_the_first_sync_and_never_changes(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair, release=["kv_cache", "weights"]) as lane:
        first = lane.plan()
        assert first.release == BOTH
        assert "release_kv_cache" in str(first)
        lane.sleep()
        lane.sync(version=1)
        pair[0].loses_a_tensor = True
        pair[1].start_anew()
        lane.sync(version=2)
        assert (lane.plan().release, lane.plan().schedule) == (first.release, first.schedule)
        assert lane.plan().digest() == first.digest()


@pytest.mark.requirement("R78")
def test_sleep_releases_and_the_next_sync_takes_back_exactly_that(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair, release=BOTH) as lane:
        lane.sync(version=1)
        lane.sleep()
        assert released(pair) == [BOTH, BOTH]
        state = lane.state.replicas[0]
        assert (state.released, state.servable) == (BOTH, False)
        assert lane.residency()[0].workers[0].released == BOTH
        with pytest.raises(NotServableError, match="has released weights, kv_cache"):
            lane.replicas[0].generate(PROMPT, max_tokens=1)
        change(weights, seed=1)
        lane.sync(version=2)
        assert released(pair) == [(), ()]
        assert all(held_equal(engine, weights) for engine in pair)
        assert lane.replicas[1].generate(PROMPT, max_tokens=1)[0].weight_version == 2
        assert lane.state.replicas[0].released == ()


def test_without_sleep_a_sync_releases_the_cache_alone(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[str] = []
    call = type(pair[0]).call

    def noting(engine: FakeMortalEngine, route: str, seconds: float) -> str:
        routes.append(route)
        return call(engine, route, seconds)

    monkeypatch.setattr(type(pair[0]), "call", noting)
    with lane_to(weights, pair[:1], release=BOTH) as lane:
        lane.sync(version=1)
        assert routes == ["release_kv_cache", "resume_kv_cache"]
    del routes[:]
    with lane_to(weights, pair[:1]) as lane:
        lane.sleep()
        lane.sync(version=1)
        assert routes == []


def test_wake_takes_back_the_cache_and_serves_on_but_weights_are_lost(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair, release=["kv_cache"]) as lane:
        lane.sync(version=1)
        lane.sleep()
        lane.sleep()
        assert released(pair) == [("kv_cache",)] * 2
        lane.wake()
        assert lane.replicas[0].generate(PROMPT, max_tokens=1)[0].weight_version == 1
    with lane_to(weights, pair, release=BOTH) as lane:
        lane.sleep()
        lane.wake()
        assert released(pair) == [(), ()]
        with pytest.raises(NotServableError, match="no full sync has written them since"):
            lane.replicas[0].generate(PROMPT, max_tokens=1)
        lane.sync(version=2)
        assert lane.replicas[0].generate(PROMPT, max_tokens=1)[0].weight_version == 2


def test_a_failure_in_between_leaves_what_is_stated_and_the_next_sync_ends_it(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    pair[1].worker = FakeForgetfulWorker(pair[1])
    with lane_to(weights, pair, release=BOTH) as lane:
        lane.sleep()
        pair[1].worker.forgets = True
        with pytest.raises(VerificationError):
            lane.sync(version=1)
        assert released(pair) == [("kv_cache",)] * 2
        for replica in lane.state.replicas:
            assert (replica.released, replica.servable) == (("kv_cache",), False)
        pair[1].worker.forgets = False
        lane.sync(version=2)
        assert released(pair) == [(), ()]
        assert lane.replicas[0].generate(PROMPT, max_tokens=1)[0].weight_version == 2


def test_a_sync_that_fails_before_it_touches_anything_gives_the_cache_back(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair, release=["kv_cache"]) as lane:
        lane.sync(version=1)
        real = pair[1].memory.release
        pair[1].memory.release = _refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineError, match="cannot release"):
            lane.sync(version=2)
        pair[1].memory.release = real  # type: ignore[method-assign]
        assert released(pair) == [(), ()]
        assert lane.replicas[0].generate(PROMPT, max_tokens=1)[0].weight_version == 1
        lane.sync(version=3)


def test_an_engine_that_somebody_else_put_to_sleep_is_refused_or_woken_as_the_policy_says(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair) as lane:
        pair[1].sleep(("weights",))
        with pytest.raises(SyncError, match="sleeps: it has released weights"):
            lane.sync(version=1)
        assert pair[0].version is None
    with lane_to(weights, pair, release=BOTH) as lane:
        lane.sync(version=2)
        assert [engine.version for engine in pair] == [2, 2]
        assert released(pair) == [(), ()]


def test_a_backend_that_cannot_release_and_a_tag_nobody_has_are_refused(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.adapters import TrainedBase
    from weightlane.plan_problems import lost_base_problems

    with pytest.raises(EngineError, match=r"names memory that no engine has: kv-cache[\s\S]*Use kv_cache"):
        lane_to(weights, pair, release=["kv-cache"])
    (problem,) = lost_base_problems(BOTH, TrainedBase("x", not_sent="no reason"))
    assert "does not bring back the base" in str(problem)

    @hookimpl
    def weightlane_plan_lifecycle(context: object) -> Lifecycle:
        return Lifecycle()

    get_registry()
    monkeypatch.setattr(plugin, "weightlane_plan_lifecycle", weightlane_plan_lifecycle)
    monkeypatch.setattr("weightlane.connect_procedure.get_registry", lambda: Registry().load())
    with pytest.raises(wl.errors.PlanError, match=r"\[release\] kv_cache: backend reference"):
        lane_to(weights, pair, release=["kv_cache"])


def _refuse(*_: object) -> None:
    raise EngineError("This engine cannot release anything now.")


def test_a_staged_version_is_not_put_to_sleep(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair[:1], release=BOTH) as lane:
        lane.stage(version=1)
        with pytest.raises(SyncError, match="Version 1 is staged"):
            lane.sleep()
        lane.commit()
        assert versions_held(pair[:1]) == [1]
        lane.sleep()


def patched(monkeypatch: pytest.MonkeyPatch, change: Callable[[Lifecycle], Lifecycle]) -> None:
    """The reference plugin plans something else around its syncs."""
    planned = plugin.weightlane_plan_lifecycle

    @hookimpl
    def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
        return change(planned(context))

    get_registry()
    monkeypatch.setattr(plugin, "weightlane_plan_lifecycle", weightlane_plan_lifecycle)
    monkeypatch.setattr("weightlane.connect_procedure.get_registry", lambda: Registry().load())


def test_an_engine_that_was_put_to_sleep_twice_is_let_generate_by_one_wake(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[str] = []
    call = type(pair[0]).call

    def noting(engine: FakeMortalEngine, route: str, seconds: float) -> str:
        routes.append(route)
        return "" if route in ("hold", "go") else call(engine, route, seconds)

    monkeypatch.setattr(type(pair[0]), "call", noting)
    held = {"pause": (EngineCall("hold"),), "resume": (EngineCall("go"),)}
    patched(monkeypatch, lambda planned: replace(planned, **held))
    with lane_to(weights, pair[:1], release=["kv_cache"]) as lane:
        lane.sync(version=1)
        del routes[:]
        lane.sleep()
        lane.sleep()
        lane.wake()
        assert routes == ["hold", "release_kv_cache", "resume_kv_cache", "go"]


def test_weights_that_an_engine_says_are_lost_are_lost_whatever_its_plan_promised(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping(planned: Lifecycle) -> Lifecycle:
        memory = tuple(replace(item, contents="kept") for item in planned.memory)
        return replace(planned, memory=memory)

    patched(monkeypatch, keeping)
    with lane_to(weights, pair[:1], release=BOTH) as lane:
        lane.sync(version=1)
        lane.sleep()
        lane.wake()
        assert not lane.residency()[0].workers[0].servable
        lane.sleep()
        assert not lane.state.replicas[0].servable
        lane.sync(version=2)
        assert lane.state.replicas[0].servable
