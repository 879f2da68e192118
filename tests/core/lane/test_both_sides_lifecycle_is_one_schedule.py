"""The plan shows one schedule of both sides' lifecycle, and a sync follows it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from fake_trainer import FakeLoadingTrainer
from local_engines import BOUNDS, FakeMortalEngine, weights_of
from msgspec.structs import replace as replace_struct

import weightlane as wl
from weightlane.errors import HookError, WeightlaneError
from weightlane.hookspecs import hookimpl
from weightlane.messages import decode
from weightlane.program import EngineCall, Lifecycle, TrainerLifecycle
from weightlane.reference import plugin as reference_plugin
from weightlane.registry import Registry, get_registry
from weightlane.schedule import ORDER, make_schedule
from weightlane.torch_trainer.export import TorchStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.contexts import BuildRequestsContext
    from weightlane.lane import Lane

OPENS = {"begin-inline": "move", "publish": "publish"}


class FakeNotingEngine(FakeMortalEngine):
    """Also has a pause, a flush and a continue; notes every call and the messages that open and publish."""

    notes: list[str]
    number = 0
    fails_at = ""

    def call(self, route: str, timeout_seconds: float) -> str:
        self.notes.append(f"{self.number}: {route}")
        if route == self.fails_at:
            raise WeightlaneError(f"{route} failed")
        return "" if route in ("pause", "flush", "go_on") else super().call(route, timeout_seconds)

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        kind = decode(message, dict[str, Any], sender="the lane")["type"]  # type: ignore[index]
        if kind in OPENS:
            self.notes.append(f"{self.number}: {OPENS[kind]}")
        return super().call_workers(message, timeout_seconds)


class Bench:
    """Two engines, a loading trainer and everything that they noted."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.trainer = FakeLoadingTrainer(self.notes)
        self.engines = [FakeNotingEngine(str(folder)) for _ in range(2)]
        for number, engine in enumerate(self.engines):
            engine.notes, engine.number = self.notes, number
        self.weights = weights_of(folder)

    def lane(self, **options: Any) -> Lane:
        return wl.connect(
            trainer=wl.trainer("loading", model=self.weights),
            rollout=[wl.rollout("reference", engine=engine) for engine in self.engines],
            bounds=BOUNDS,
            **options,
        )

    def first(self, note: str) -> int:
        return self.notes.index(note)

    def last(self, note: str) -> int:
        return len(self.notes) - 1 - self.notes[::-1].index(note)


@pytest.fixture
def bench(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    get_registry()  # the engines' agents look in it; loaded now, it keeps the healthy plugin
    bench = Bench(model_folder)
    healthy: Callable[[Any], Lifecycle] = reference_plugin.weightlane_plan_lifecycle

    @hookimpl
    def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
        return replace_struct(
            healthy(context),
            pause=(EngineCall("pause"),),
            settle=(EngineCall("flush"),),
            resume=(EngineCall("go_on"),),
        )

    monkeypatch.setattr(reference_plugin, "weightlane_plan_lifecycle", weightlane_plan_lifecycle)
    registry = Registry().load()
    registry.register(bench.trainer, name="loading")
    monkeypatch.setattr("weightlane.connect_procedure.get_registry", lambda: registry)
    return bench


def expected(kinds: str) -> list[str]:
    """`pause flush` as noted by both engines in turn; `onload` and `offload` are the one rank's."""
    noted: list[str] = []
    for kind in kinds.split():
        noted += [kind] if kind in ("onload", "offload") else [f"0: {kind}", f"1: {kind}"]
    return noted


def test_a_sync_takes_every_step_in_the_order_that_the_plan_shows(bench: Bench) -> None:
    with bench.lane(release=["weights", "kv_cache"]) as lane:
        lane.sync(version=1)
        assert bench.notes == expected(
            "pause release_kv_cache onload move offload flush resume_kv_cache publish go_on"
        )
        shown = str(lane.plan())
        printed = [shown.index(f"{number}. ") for number in range(1, len(lane.plan().schedule.steps) + 1)]
        assert printed == sorted(printed)
        routes = [step.what for step in lane.plan().schedule.steps if step.replica == 0]
        assert routes == [
            "pause",
            "release_kv_cache",
            "resume_weights",
            "flush",
            "resume_kv_cache",
            "by its agent",
            "go_on",
        ]
        del bench.notes[:]
        lane.sleep()
        steps = ("pause", "release_weights", "release_kv_cache")
        assert bench.notes == [f"{number}: {step}" for number in range(2) for step in steps]
        del bench.notes[:]
        lane.sync(version=2)
        assert bench.notes == [
            *expected("resume_weights onload move offload flush resume_kv_cache publish go_on"),
        ]


def test_both_sides_keep_their_order_whatever_is_asked_for(bench: Bench) -> None:
    for release in ([], ["kv_cache"], ["weights"]):
        del bench.notes[:]
        with bench.lane(release=release) as lane:
            lane.sync(version=1)
            kinds = [step.kind for step in lane.plan().schedule.steps]
        assert kinds == sorted(kinds, key=ORDER.index)
        for number in range(2):
            assert bench.first(f"{number}: pause") < bench.first("onload")
            assert bench.first("onload") < bench.first(f"{number}: move") < bench.first("offload")
            assert bench.first("offload") < bench.first(f"{number}: flush")
            assert bench.last(f"{number}: flush") < bench.first("0: publish")
            assert bench.last("1: publish") < bench.first(f"{number}: go_on")
            assert (f"{number}: resume_kv_cache" in bench.notes) == ("kv_cache" in release)
            assert f"{number}: resume_weights" not in bench.notes, "it was not released"
            if "kv_cache" in release:
                assert bench.first("offload") < bench.first(f"{number}: resume_kv_cache")
                assert bench.first(f"{number}: resume_kv_cache") < bench.first("0: publish")


def test_an_onload_that_fails_ends_the_sync_before_the_first_bucket_and_is_undone(bench: Bench) -> None:
    with bench.lane(release=["kv_cache"]) as lane:
        bench.trainer.fails = True
        with pytest.raises(HookError, match="no room for the parameters"):
            lane.sync(version=1)
        assert bench.notes[4:6] == ["onload", "offload"]
        assert not [note for note in bench.notes if "move" in note or "publish" in note]
        bench.trainer.fails = False
        lane.sync(version=2)
        assert [engine.version for engine in bench.engines] == [2, 2]
        assert [engine.memory.released for engine in bench.engines] == [(), ()]


@pytest.mark.parametrize("step", ["release_kv_cache", "flush", "resume_kv_cache"])
def test_a_step_that_fails_publishes_nothing_and_the_next_sync_goes_through(bench: Bench, step: str) -> None:
    with bench.lane(release=["kv_cache"]) as lane:
        lane.sync(version=1)
        bench.engines[1].fails_at = step
        with pytest.raises(WeightlaneError, match=f"{step} failed"):
            lane.sync(version=2)
        assert [engine.version for engine in bench.engines] == [1, 1]
        assert lane.state.phase == "failed"
        bench.engines[1].fails_at = ""
        if step == "release_kv_cache":
            # Nobody knows whether the engine had released it; here it had not, and says so when it is asked.
            assert bench.engines[1].memory.released == ()
        lane.sync(version=3)
        assert [engine.version for engine in bench.engines] == [3, 3]
        assert [engine.memory.released for engine in bench.engines] == [(), ()]


def test_a_stream_that_cannot_do_what_was_planned_is_blamed_on_its_plugin(bench: Bench) -> None:
    bench.trainer.stream = TorchStream
    with (
        bench.lane() as lane,
        pytest.raises(HookError, match="gave a stream without onload"),
    ):
        lane.sync(version=1)


def test_a_trainer_that_plans_nothing_adds_nothing(bench: Bench) -> None:
    schedule = make_schedule([], TrainerLifecycle())
    assert [step.kind for step in schedule.steps] == ["move", "verify"]


def test_the_order_puts_what_the_rules_ask_for_where_they_ask_for_it() -> None:
    rules = [
        ("pause", "release"),
        ("release", "onload"),
        ("onload", "move"),
        ("move", "offload"),
        ("offload", "resume-memory"),
        ("move", "flush"),
        ("verify", "publish"),
        ("resume-memory", "publish"),
        ("flush", "read-back"),
        ("read-back", "publish"),
        ("publish", "continue"),
    ]
    for earlier, later in rules:
        assert ORDER.index(earlier) < ORDER.index(later)  # type: ignore[arg-type]
    assert len(set(itertools.chain(*rules)) | {"resume-weights"}) == len(ORDER)
