"""`lane.state` tells what is known without asking, `lane.residency()` what the replicas say."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from local_engines import FakeForgetfulWorker, engines, lane_to, weights_of

from weightlane.errors import EngineDeadError, VerificationError

if TYPE_CHECKING:
    from pathlib import Path


def test_each_step_of_a_lane_shows_in_its_state(model_folder: Path) -> None:
    pair = engines(model_folder)
    pair[1].worker = FakeForgetfulWorker(pair[1])
    lane = lane_to(weights_of(model_folder), pair)
    seen = [lane.state]
    lane.stage(version=5)
    seen.append(lane.state)
    lane.commit()
    seen.append(lane.state)
    pair[1].worker.forgets = True
    with pytest.raises(VerificationError):
        lane.sync(version=6)
    seen.append(lane.state)
    lane.close()
    seen.append(lane.state)
    assert [state.phase for state in seen] == ["open", "staged", "published", "failed", "closed"]
    assert [state.staged_version for state in seen] == [None, 5, None, None, None]
    assert [state.published_version for state in seen] == [None, None, 5, 5, 5]
    assert [state.syncs for state in seen] == [0, 1, 1, 2, 2]
    assert [state.replicas[0].servable for state in seen[:4]] == [True, False, True, None]
    assert [state.replicas[1].held_version for state in seen] == [None, None, 5, 5, 5]
    assert "VerificationError" in seen[3].last_error
    incarnation = pair[0].worker.current_incarnation()
    assert seen[2].replicas[0].incarnations == ((0, incarnation),)
    assert "published 5" in str(seen[2])
    assert f"version 5, servable, incarnation {incarnation}" in str(seen[2])


def test_a_state_is_frozen_and_asks_nobody(model_folder: Path) -> None:
    pair = engines(model_folder)
    lane = lane_to(weights_of(model_folder), pair)
    pair[0].dead = pair[1].dead = True
    state = lane.state
    assert state.phase == "open"
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.phase = "closed"  # type: ignore[misc]
    lane.close()


def test_residency_asks_every_replica_and_lists_one_that_is_gone(model_folder: Path) -> None:
    pair = engines(model_folder)
    with lane_to(weights_of(model_folder), pair) as lane:
        lane.sync(version=3)
        pair[0].dead = True
        first, second = lane.residency(seconds=2.0)
        assert isinstance(first.error, EngineDeadError)
        assert first.address in str(first)
        (worker,) = second.workers
        assert (worker.held_version, worker.servable, worker.released) == (3, True, ())
        assert second.is_as_planned(lane.plan().replicas[1], lane.plan().digest())
        assert "version 3, servable" in str(second)
        assert lane.state.replicas[0].last_error.startswith("EngineDeadError")
        pair[1].start_anew()
        assert not lane.residency()[1].is_as_planned(lane.plan().replicas[1], lane.plan().digest())
