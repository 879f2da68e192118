"""Two trainer ranks, one engine in rank 0's process and one behind a front: the same proof as on one rank.

The front is served by a thread of the test's own process, over its socket: one process less to start.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.front.client import FrontEndpoint
from weightlane.front.server import serve_front
from weightlane.front.socket_folder import socket_folder
from weightlane.testing.ranks import RankGroup, RankOutcome
from weightlane.testing.steps import Step, steps_named

if TYPE_CHECKING:
    from weightlane.reference.engine import ReferenceEngine

PROGRAM = Path(__file__).with_name("adapter_rank_program.py")


@pytest.fixture(scope="module")
def outcomes(model_folder: str, engine: ReferenceEngine) -> list[RankOutcome]:
    with socket_folder() as folder:
        address = f"unix:{folder}/front.sock"
        front = threading.Thread(target=serve_front, args=(engine, address), daemon=True)
        front.start()
        environment = {"ADAPTER_TEST_MODEL": model_folder, "ADAPTER_TEST_URL": address, "HF_HUB_OFFLINE": "1"}
        try:
            with RankGroup([str(PROGRAM)], 2, environment) as group:
                outcomes = group.wait(110.0)
        finally:
            FrontEndpoint(address, 10.0).shutdown()
            front.join(10.0)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes


def told_by_both(outcomes: list[RankOutcome], name: str) -> list[Step]:
    found = steps_named(outcomes, name)
    assert len(found) == 2
    return found


@pytest.mark.requirement("R55")
@pytest.mark.requirement("R56")
@pytest.mark.requirement("R67")
@pytest.mark.parametrize(
    ("name", "syncs", "peers"),
    [("shm", 10, [0, 1]), ("inline", 5, [0, 0]), ("inprocess", 5, [0]), ("partitioned", 2, [0, 1])],
)
def test_each_sync_moves_every_engine_to_the_trainer(
    outcomes: list[RankOutcome], name: str, syncs: int, peers: list[int]
) -> None:
    first, second = told_by_both(outcomes, name)
    assert first.facts["peers"] == second.facts["peers"] == peers
    assert float(str(first.facts["moved"][0])) >= 1e-2
    assert 0.0 < float(str(first.facts["apart"][0])) <= 1e-4
    engines, prompts = len(peers), 2
    assert first.facts["versions"] == [
        version for version in range(1, syncs + 1) for _ in range(engines * prompts)
    ]
    assert "adapter bound to 6 modules on 1" in str(first.facts["verified"][0])
    assert first.facts["ref"] == second.facts["ref"] == [f"default@{syncs}"]


def test_the_base_goes_to_the_engine_alone_that_holds_another_and_comes_from_both_ranks(
    outcomes: list[RankOutcome],
) -> None:
    for step in told_by_both(outcomes, "base to one"):
        assert step.facts["phases"] == ["base", "adapter"]
        assert step.facts["to"] == [0]
        assert int(str(step.facts["bytes"][0])) > int(str(step.facts["bytes"][1])) > 0
        assert "replica 0: worker 0 holds no base" in str(step.facts["why"][0])
        assert step.facts["again"] == ["adapter"]
    mine = told_by_both(outcomes, "base to one")[0].facts
    assert mine["equal"] == [1]
    assert float(str(mine["apart"][0])) <= 1e-4


@pytest.mark.requirement("R68")
def test_a_rank_that_breaks_off_half_way_leaves_every_engine_as_it_was(outcomes: list[RankOutcome]) -> None:
    for step in told_by_both(outcomes, "broken sync"):
        assert "the cable is out" in step.text
        assert "serve the adapter that they served before" in step.text
    told = told_by_both(outcomes, "after the broken sync")[0].facts
    assert told["same"] == [1]
    assert float(str(told["moved"][0])) >= 1e-2
    assert [step.outcome for step in told_by_both(outcomes, "next sync")] == ["ok", "ok"]
    first, second = told_by_both(outcomes, "after the next sync")
    assert float(str(first.facts["apart"][0])) <= 1e-4
    assert first.facts["ref"] == second.facts["ref"] == ["default@51"]
