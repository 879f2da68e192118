"""Requests name an adapter and nothing else: a name belongs to one living lane of a worker."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from fake_adapter_engine import (
    BASE,
    CONFIG,
    FakeAdapterEngine,
    ask,
    attached,
    begin,
    buckets,
    plan,
    values,
    whole_sync,
)

from weightlane import attach_check, lane_owner
from weightlane.adapters import AdapterExpression, AdapterPlan
from weightlane.errors import PlanError
from weightlane.lane_owner import LaneOwner, is_gone, this_process
from weightlane.messages import Attach, Detach, FinishInline, Publish
from weightlane.peft import peft_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.agent import WorkerAgent


@pytest.fixture
def engine() -> FakeAdapterEngine:
    return FakeAdapterEngine()


def sync_of(agent: WorkerAgent, lane: str, sync: int, version: int, first: float) -> None:
    begin(agent, sync, version, lane)
    named = [(name, torch.full_like(tensor, first)) for name, tensor in values(version).items()]
    for layout in buckets():
        agent.load_by_reference(lane, sync, layout.index, [named[entry.tensor] for entry in layout.entries])
    ask(agent, FinishInline(lane, sync))
    ask(agent, Publish(lane, sync, version))


def answers(engine: FakeAdapterEngine) -> dict[str, set[float]]:
    """What may answer a request, by the name that it asks for: the first number of each adapter so called."""
    found: dict[str, set[float]] = {}
    for load in engine.slots.values():
        found.setdefault(load.ref.name, set()).add(float(next(iter(load.tensors.values())).flatten()[0]))
    return found


@contextmanager
def trainer_process() -> Iterator[tuple[Any, LaneOwner]]:
    """A process that could hold a lane, and what a plan says of it."""
    mine = this_process()
    assert mine is not None
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            seen = lane_owner._look(process.pid)
            assert seen is not None
            yield process, LaneOwner(mine.host, mine.namespace, process.pid, seen[1])
        finally:
            process.kill()


def test_a_second_lane_with_the_name_is_refused_and_the_first_goes_on(engine: FakeAdapterEngine) -> None:
    agent = attached(engine)
    sync_of(agent, "lane-1", 1, 1, 11.0)
    with pytest.raises(
        PlanError, match=r"adapter-name\] policy: lane lane-1 holds.*lane lane-2.*another name"
    ):
        ask(agent, Attach(plan(lane="lane-2")))
    assert answers(engine) == {"policy@1": {11.0}}
    sync_of(agent, "lane-1", 2, 2, 12.0)
    assert answers(engine) == {"policy@2": {12.0}}
    ask(agent, Attach(plan()))  # its own plan anew is none of another's


def test_control_without_the_refusal_one_name_has_two_answers(
    engine: FakeAdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_check, "_adapter_name_taken", lambda plan, attached, receiver: [])
    agent = attached(engine)
    sync_of(agent, "lane-1", 1, 1, 11.0)
    ask(agent, Attach(plan(lane="lane-2")))
    sync_of(agent, "lane-2", 1, 1, 22.0)
    assert answers(engine) == {"policy@1": {11.0, 22.0}}, "and even so, no lane removed another's slot"


def test_lanes_with_names_of_their_own_serve_side_by_side(engine: FakeAdapterEngine) -> None:
    config = msgspec.structs.replace(CONFIG, name="critic")
    adapter = AdapterPlan(config, AdapterExpression("two_slot", peft_json(config)), BASE)
    agent = attached(engine)
    ask(agent, Attach(plan(lane="lane-2", adapter=adapter)))
    for sync in (1, 2):
        sync_of(agent, "lane-1", sync, sync, 10.0 + sync)
        sync_of(agent, "lane-2", sync, sync, 20.0 + sync)
    assert answers(engine) == {"policy@2": {12.0}, "critic@2": {22.0}}


def test_who_follows_a_closed_lane_takes_its_name_and_replaces_the_rest(
    engine: FakeAdapterEngine,
) -> None:
    agent = attached(engine)
    sync_of(agent, "lane-1", 1, 1, 11.0)
    ask(agent, Detach("lane-1"))
    ask(agent, Attach(plan(lane="lane-2")))
    assert answers(engine) == {"policy@1": {11.0}}, "it serves until the new one is published"
    sync_of(agent, "lane-2", 1, 1, 22.0)
    assert answers(engine) == {"policy@1": {22.0}}
    assert len(engine.slots) == 1


def test_who_follows_a_killed_trainer_takes_its_name(
    engine: FakeAdapterEngine,
) -> None:
    with trainer_process() as (process, owner):
        agent = attached(engine, plan(owner=owner))
        whole_sync(agent, 1, 1)
        with pytest.raises(PlanError, match="lane lane-1 holds"):
            ask(agent, Attach(plan(lane="lane-2")))
        process.kill()
        process.wait()
        ask(agent, Attach(plan(lane="lane-2")))
    sync_of(agent, "lane-2", 1, 2, 22.0)
    assert answers(engine) == {"policy@2": {22.0}}


def test_a_process_is_gone_only_where_that_is_certain() -> None:
    with trainer_process() as (process, owner):
        assert not is_gone(owner)
        assert not is_gone(None)
        assert is_gone(msgspec.structs.replace(owner, started=owner.started - 1)), "the number was given anew"
        process.kill()
        process.wait()
        assert is_gone(owner)
        assert not is_gone(msgspec.structs.replace(owner, host="another")), "nobody can look from here"
        assert not is_gone(msgspec.structs.replace(owner, namespace="pid:[1]"))
    mine = this_process()
    assert mine is not None
    assert not is_gone(mine)
