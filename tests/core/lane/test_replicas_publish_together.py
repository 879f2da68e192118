"""Nothing is published on any replica before every worker of every replica has verified."""

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

from weightlane import sync_run
from weightlane.errors import NotServableError, SyncError, VerificationError
from weightlane.messages import Generate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from local_engines import FakeMortalEngine
    from torch import Tensor

    from weightlane.lane import Lane


@pytest.fixture
def pair(model_folder: Path) -> list[FakeMortalEngine]:
    return engines(model_folder)


@pytest.fixture
def weights(model_folder: Path) -> dict[str, Tensor]:
    return weights_of(model_folder)


@pytest.fixture(params=["inprocess", "inline"])
def lane(
    request: pytest.FixtureRequest, pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> Iterator[Lane]:
    for engine in pair:
        engine.worker = FakeForgetfulWorker(engine)
    with lane_to(weights, pair, transport=request.param) as opened:
        yield opened


def test_stage_moves_to_all_and_publishes_on_none_and_commit_on_all(
    lane: Lane, pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    lane.sync(version=1)
    change(weights, seed=1)
    report = lane.stage(version=2)
    assert [replica.replica for replica in report.replicas] == [0, 1]
    assert all(held_equal(engine, weights) for engine in pair)
    assert (versions_held(pair), lane.published_version) == ([1, 1], 1)
    lane.commit()
    assert (versions_held(pair), lane.published_version) == ([2, 2], 2)
    for endpoint in lane.replicas:
        assert endpoint.generate(PROMPT, max_tokens=1)[0].weight_version == 2


def test_a_replica_that_fails_verification_keeps_every_other_from_the_new_version(
    lane: Lane, pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    lane.sync(version=1)
    change(weights, seed=1)
    pair[1].worker.forgets = True  # type: ignore[attr-defined]
    with pytest.raises(VerificationError, match="tensors handed to the loader"):
        lane.sync(version=2)
    assert (versions_held(pair), lane.published_version) == ([1, 1], 1)
    # Full weights are written in place: the old version is no more, so neither replica generates from a mix.
    for engine in pair:
        with pytest.raises(NotServableError):
            engine.generate(_probe())
    with pytest.raises(SyncError, match="nothing staged"):
        lane.commit()
    pair[1].worker.forgets = False  # type: ignore[attr-defined]
    lane.sync(version=3)
    assert versions_held(pair) == [3, 3]


@pytest.mark.requirement("R68", part="full weights")
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_stage_that_fails_half_way_neither_replica_generates(
    lane: Lane, pair: list[FakeMortalEngine], weights: dict[str, Tensor], victim: int
) -> None:
    breaking = pair[victim].worker
    assert isinstance(breaking, FakeForgetfulWorker)
    lane.sync(version=1)
    old = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights, seed=1)
    breaking.loads_left = 2
    with pytest.raises(SyncError, match="had begun to write are fenced"):
        lane.stage(version=2)
    assert not held_equal(pair[victim], old)
    assert not held_equal(pair[victim], weights), "it is half-written, or there is nothing to refuse"
    for engine, endpoint in zip(pair, lane.replicas, strict=True):
        with pytest.raises(NotServableError):
            endpoint.generate(PROMPT, max_tokens=1)
        with pytest.raises(NotServableError):
            engine.generate(_probe())
    breaking.loads_left = -1
    lane.sync(version=3)
    assert [endpoint.generate(PROMPT, max_tokens=1)[0].weight_version for endpoint in lane.replicas] == [3, 3]


def test_without_the_fence_one_would_generate_from_a_mix_under_the_old_version(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking = pair[1].worker = FakeForgetfulWorker(pair[1])
    with lane_to(weights, pair) as lane:
        lane.sync(version=1)
        monkeypatch.setattr(type(pair[1]), "fence", lambda engine, version: None)
        change(weights, seed=1)
        breaking.loads_left = 2
        with pytest.raises(SyncError, match="The loader broke"):
            lane.stage(version=2)
        assert pair[1].generate(_probe()).generations[0].weight_version == 1


def test_without_the_rule_one_replica_would_be_ahead(
    lane: Lane, pair: list[FakeMortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.replica_session import ReplicaSession

    reports = ReplicaSession.reports

    def publish_at_once(session: ReplicaSession, sync: int, check: object) -> object:
        found = reports(session, sync, check)  # type: ignore[arg-type]
        session.publish(sync, found[0].version)
        return found

    monkeypatch.setattr(ReplicaSession, "reports", publish_at_once)
    pair[1].worker.forgets = True  # type: ignore[attr-defined]
    with pytest.raises(VerificationError):
        lane.sync(version=1)
    assert versions_held(pair)[0] == 1


def test_a_replica_started_anew_since_stage_keeps_every_one_from_the_staged_version(
    lane: Lane, pair: list[FakeMortalEngine]
) -> None:
    lane.stage(version=1)
    pair[1].start_anew()
    with pytest.raises(SyncError, match="Version 1 was staged and is not published: replica 1") as caught:
        lane.commit()
    assert "served by no replica" in str(caught.value)
    assert (versions_held(pair), lane.published_version) == ([None, None], None)
    lane.sync(version=2)
    assert versions_held(pair) == [2, 2]


def test_control_without_asking_again_the_first_replica_is_published_alone(
    lane: Lane, pair: list[FakeMortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "require_what_was_staged", lambda *members, version: None)
    lane.stage(version=1)
    pair[1].start_anew()
    with pytest.raises(SyncError):
        lane.commit()
    assert versions_held(pair) == [1, None]


def test_a_staged_version_can_be_replaced_by_another(
    lane: Lane, pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    lane.stage(version=1)
    change(weights, seed=1)
    lane.stage(version=2)
    lane.commit()
    assert versions_held(pair) == [2, 2]
    assert all(held_equal(engine, weights) for engine in pair)


def _probe() -> Generate:
    return Generate(((1, 2, 3),), 1)
