"""A rank that gives up a sync leaves it in time, and once, however late the controller is."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from control_peers import free_address, open_channel

from weightlane import sync_verdicts
from weightlane.bounds import Bounds
from weightlane.errors import SyncCancelledError, SyncError
from weightlane.lane_messages import Committed, Go, SyncGo
from weightlane.starting import StartProcedure
from weightlane.sync_run import SyncRun
from weightlane.sync_verdicts import SyncVerdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.control import ControlChannel

BOUNDS = Bounds(start=1.0, lost_after=0.1)
PATIENCE = 3.0
CANCELLED = SyncCancelledError("Sync 1 was given up on rank 1.", "Its task was cancelled.", "Sync again.")


class FakeMembership:
    """One replica, which nothing is asked of, and a trainer without collectives."""

    def __init__(self) -> None:
        self.plan = SimpleNamespace(
            digest=lambda: "p1",
            bucket_waits=1,
            replicas=(None,),
            manifest=SimpleNamespace(collective=False),
            receivers_in_failure="are fenced",
        )
        self.joined = (1,)
        self.sessions = ()
        self.mover = SimpleNamespace(abort=lambda cause, sync: None)

    def distrust(self, replicas: set[int]) -> None:
        assert replicas == set()

    def taking_part(self, missing: frozenset[int]) -> tuple[()]:
        return ()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ControlChannel, ControlChannel]]:
    """Rank 0's and rank 1's ends."""
    monkeypatch.setattr(sync_verdicts, "_VERDICT_SECONDS", 0.4)
    address = free_address()
    with ExitStack() as stack:
        controller = open_channel(address, 0, 2)
        stack.callback(controller.close, seconds=0.0)
        other = open_channel(address, 1, 2)
        stack.callback(other.close)
        yield controller, other


def start_of(channel: ControlChannel) -> StartProcedure:
    members: Any = FakeMembership()
    return StartProcedure(members, channel, BOUNDS, sync=1, version=10, patience=PATIENCE, abort="sync-1")


def run_of(channel: ControlChannel) -> SyncRun:
    members: Any = FakeMembership()
    events: Any = SimpleNamespace(tell=lambda *what, **more: None)
    return SyncRun(members, channel, BOUNDS, events, sync=1, version=10)


def test_a_rank_that_gives_up_does_not_wait_for_a_controller_that_never_comes(
    ranks: tuple[ControlChannel, ControlChannel],
) -> None:
    _, other = ranks
    other.abort("sync-1", CANCELLED)
    # Without the abort it is a SyncTimeoutError, after all of the patience.
    with pytest.raises(SyncCancelledError, match="given up on rank 1"):
        start_of(other).run(lambda: None)


def test_a_go_that_was_given_counts_beside_an_abort(ranks: tuple[ControlChannel, ControlChannel]) -> None:
    controller, other = ranks

    def ready() -> None:
        other.abort("sync-1", CANCELLED)
        controller.put("sync/1/go", SyncGo())

    assert start_of(other).run(ready) == SyncGo()


def test_a_controller_that_comes_late_hears_of_it_before_it_asks_any_engine(
    ranks: tuple[ControlChannel, ControlChannel],
) -> None:
    controller, other = ranks
    other.abort("sync-1", CANCELLED)
    with pytest.raises(SyncCancelledError, match="given up on rank 1"):
        start_of(controller).run(lambda: None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sync_is_interrupted_once_on_all_ranks_together(
    ranks: tuple[ControlChannel, ControlChannel], rank: int
) -> None:
    runs = [run_of(channel) for channel in ranks]
    assert runs[rank].interrupt("Its task was cancelled.")
    assert not runs[0].interrupt("Its task was cancelled.")
    assert not runs[1].interrupt("Its task was cancelled.")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sync_that_has_failed_cannot_be_interrupted(
    ranks: tuple[ControlChannel, ControlChannel], rank: int
) -> None:
    run = run_of(ranks[rank])
    failed = run.failed(SyncError("The ranks do not agree.", "Each has its own loop.", "Check it."))
    assert str(failed).startswith("The ranks do not agree")
    assert not run.interrupt("Its task was cancelled.")


def test_what_a_rank_still_waits_for_is_forgotten_only_when_it_has_gone_on(
    ranks: tuple[ControlChannel, ControlChannel],
) -> None:
    controller, other = ranks

    def forget_at(sync: int) -> None:
        controller.put(f"sync/{sync}/start/0", Go())
        SyncVerdicts(controller, sync, abort="", patience=PATIENCE, grace=0.1).forget_before()

    forget_at(1)
    other.put("sync/1/start/1", Go())
    controller.put("sync/1/committed", Committed(10))
    forget_at(2)  # given up at its start, before rank 1 has come to it
    forget_at(3)
    assert other.get("sync/1/committed", Committed, seconds=0.0, awaited=()) == Committed(10)
    other.put("sync/2/start/1", Go())
    other.put("sync/3/start/1", Go())
    forget_at(4)
    assert not any(other.has(f"sync/{sync}/start/0") for sync in (1, 2))
    assert not other.has("sync/1/committed")
    assert other.has("sync/3/start/0", "sync/3/start/1")
