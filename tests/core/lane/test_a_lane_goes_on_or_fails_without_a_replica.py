"""What `missing_replicas` means: fail before anything is written, or go on and take the replica back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from local_engines import PROMPT, change, engines, held_equal, lane_to, versions_held, weights_of

from weightlane.errors import EngineDeadError, PlanError
from weightlane.replica_session import ReplicaSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from local_engines import FakeMortalEngine
    from torch import Tensor


@pytest.fixture
def pair(model_folder: Path) -> list[FakeMortalEngine]:
    return engines(model_folder)


@pytest.fixture
def weights(model_folder: Path) -> dict[str, Tensor]:
    return weights_of(model_folder)


def test_by_default_it_fails_before_any_write_and_the_others_go_on_serving(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor]
) -> None:
    with lane_to(weights, pair) as lane:
        assert "missing replicas: fail" in str(lane.plan())
        lane.sync(version=1)
        change(weights, seed=1)
        pair[0].dead = True
        with pytest.raises(EngineDeadError, match=r"Replica 0 of lane .* before sync 2.*touched no receiver"):
            lane.sync(version=2)
        assert not held_equal(pair[1], weights)
        assert lane.replicas[1].generate(PROMPT, max_tokens=1)[0].weight_version == 1
        pair[0].dead = False
        lane.sync(version=3)
        assert versions_held(pair) == [3, 3]


@pytest.mark.parametrize("transport", ["inprocess", "inline", "shm", "disk"])
def test_skip_goes_on_without_it_and_takes_it_back_when_it_answers(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], transport: str
) -> None:
    with lane_to(weights, pair, missing_replicas="skip", transport=transport) as lane:
        lane.sync(version=1)
        change(weights, seed=1)
        pair[1].dead = True
        report = lane.sync(version=2)
        assert [(item.replica, "killed" in item.cause) for item in report.missing] == [(1, True)]
        assert [item.replica for item in report.replicas] == [0]
        assert versions_held(pair) == [2, 1]
        away = lane.state.replicas[1]
        assert (away.held_version, "killed" in away.missing, away.servable) == (1, True, None)
        pair[1].start_anew()
        assert "servable unknown, missing" in str(lane.state.replicas[1]), "it answers, and lags behind"
        report = lane.sync(version=3)
        assert (report.missing, report.rejoined) == ((), (1,))
        assert lane.state.replicas[1].servable
        assert versions_held(pair) == [3, 3]
        assert all(held_equal(engine, weights) for engine in pair)
        assert lane.state.replicas[1].missing == ""


def test_what_a_sync_goes_on_without_is_asked_for_its_residency_once_and_for_nothing_else(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        inner = getattr(ReplicaSession, name)

        def noted(session: ReplicaSession, *arguments: Any) -> Any:
            asked.append((session.number, name))
            return inner(session, *arguments)

        return noted

    steps = ("adopt", "attach", "begin", "take_step", "reports", "publish", "resume", "cancel")
    with lane_to(weights, pair, missing_replicas="skip") as lane:
        lane.sync(version=1)
        pair[1].dead = True
        with monkeypatch.context() as patched:
            for name in ("residency", *steps):
                patched.setattr(ReplicaSession, name, noting(name))
            lane.sync(version=2)
        assert [name for number, name in asked if number == 1] == ["residency"]
        assert {"begin", "take_step", "reports", "publish", "resume"} <= {name for _, name in asked}


def test_skip_does_not_go_on_without_all(pair: list[FakeMortalEngine], weights: dict[str, Tensor]) -> None:
    with lane_to(weights, pair, missing_replicas="skip") as lane:
        pair[0].dead = pair[1].dead = True
        with pytest.raises(EngineDeadError, match="So is it with"):
            lane.sync(version=1)


def test_skip_does_not_skip_one_that_came_back_as_another(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    import torch

    with lane_to(weights, pair, missing_replicas="skip") as lane:
        lane.sync(version=1)
        pair[1].model.lm_head.weight = torch.nn.Parameter(torch.zeros(512, 32))
        pair[1].start_anew()
        with pytest.raises(PlanError, match=r"\[shape\] lm_head.weight"):
            lane.sync(version=2)
        assert versions_held(pair)[0] == 1


def test_without_the_question_before_a_sync_it_would_fail_only_while_moving(
    pair: list[FakeMortalEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.membership import Membership

    with lane_to(weights, pair) as lane:
        lane.sync(version=1)
        monkeypatch.setattr(Membership, "ask", lambda members, seconds: [])
        pair[1].dead = True
        with pytest.raises(EngineDeadError, match="receivers that had begun to write"):
            lane.sync(version=2)
