"""`lane.aio`: nothing blocks the loop; a cancelled await leaves a state that is told, never half a sync."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from local_engines import PROMPT, engines, lane_to, weights_of

from weightlane.errors import SyncCancelledError, SyncError
from weightlane.reference.worker import ReferenceWorker
from weightlane.testing.steps import steps_named
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from conftest import EngineProcess
    from local_engines import FakeMortalEngine
    from torch import Tensor

    from weightlane.lane import Lane
    from weightlane.testing.ranks import RankOutcome
    from weightlane.types import MemoryTag

SECONDS = 10.0


class FakeGatedWorker(ReferenceWorker):
    """Stops before it loads, or before it publishes, until the test lets it go on."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.stops_at = ""
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def stops_again_at(self, step: str) -> threading.Event:
        """Where the next stop is; gives what lets the stop that is under way go on."""
        under_way = self.go_on
        self.stops_at, self.stopped, self.go_on = step, threading.Event(), threading.Event()
        return under_way

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        self._stop("load")
        return super().load_weights(tensors)

    def publish(self, version: int) -> None:
        self._stop("publish")
        super().publish(version)

    def _stop(self, step: str) -> None:
        if step == self.stops_at:
            self.stopped.set()
            assert self.go_on.wait(SECONDS), "the event loop is blocked: it did not let the worker go on"


@pytest.fixture
def pair(model_folder: Path) -> list[FakeMortalEngine]:
    pair = engines(model_folder)
    pair[0].worker = FakeGatedWorker(pair[0])
    return pair


@pytest.fixture
def gate(pair: list[FakeMortalEngine]) -> FakeGatedWorker:
    worker = pair[0].worker
    assert isinstance(worker, FakeGatedWorker)
    return worker


@pytest.fixture
def lane(pair: list[FakeMortalEngine], model_folder: Path) -> Iterator[Lane]:
    with lane_to(weights_of(model_folder), pair) as opened:
        yield opened


async def stopped(gate: FakeGatedWorker) -> None:
    assert await asyncio.to_thread(gate.stopped.wait, SECONDS)


def test_the_loop_goes_on_while_a_sync_runs(lane: Lane, gate: FakeGatedWorker) -> None:
    async def main() -> None:
        gate.stops_at = "load"
        sync = asyncio.create_task(lane.aio.sync(version=1))
        await stopped(gate)
        gate.go_on.set()  # by the loop itself: were it blocked, the worker would wait in vain
        assert (await sync).version == 1

    asyncio.run(main())
    assert lane.published_version == 1


def test_stage_commit_and_close_have_twins(lane: Lane, pair: list[FakeMortalEngine]) -> None:
    async def main() -> None:
        async with lane.aio as aio:
            await aio.stage(version=1)
            assert lane.state.phase == "staged"
            await aio.commit()
            assert [answer.workers[0].held_version for answer in await aio.residency()] == [1, 1]
            first, second = await asyncio.gather(aio.sync(version=2), aio.sync(version=3))
            assert (first.sync, second.sync) == (2, 3)

    asyncio.run(main())
    assert lane.state.phase == "closed"
    assert [engine.version for engine in pair] == [3, 3]


def test_sleep_and_wake_have_twins_that_do_it(pair: list[FakeMortalEngine], model_folder: Path) -> None:
    def released() -> list[tuple[str, ...]]:
        return [engine.memory.released for engine in pair]

    async def main(tags: tuple[MemoryTag, ...], version: int) -> None:
        async with lane_to(weights_of(model_folder), pair, release=tags).aio as aio:
            await aio.sync(version=version)
            assert released() == [(), ()]
            await aio.sleep()
            assert released() == [tags, tags]
            assert [answer.workers[0].released for answer in await aio.residency()] == [tags, tags]
            await aio.wake()
            assert released() == [(), ()]
            await aio.sleep()
            await aio.sync(version=version + 1)
            assert released() == [(), ()]

    asyncio.run(main(("kv_cache",), 1))
    asyncio.run(main(("weights", "kv_cache"), 3))
    assert [engine.version for engine in pair] == [4, 4]


def test_cancelled_while_it_moves_it_fails_everywhere_and_the_next_sync_heals(
    lane: Lane, gate: FakeGatedWorker, pair: list[FakeMortalEngine]
) -> None:
    async def main() -> None:
        await lane.aio.sync(version=1)
        gate.stops_at = "load"
        sync = asyncio.create_task(lane.aio.sync(version=2))
        await stopped(gate)
        sync.cancel()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.2, gate.go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await sync
        state = lane.state
        assert (state.phase, state.published_version, state.staged_version) == ("failed", 1, None)
        assert state.last_error.startswith("SyncCancelledError")
        assert "had begun to write are fenced" in state.last_error
        assert [replica.servable for replica in state.replicas] == [None, None]
        assert [engine.version for engine in pair] == [1, 1]
        gate.stops_at = ""
        await lane.aio.sync(version=3)

    asyncio.run(main())
    assert (lane.state.phase, [engine.version for engine in pair]) == ("published", [3, 3])


def test_cancelled_while_it_is_published_it_is_published_whole(
    lane: Lane, gate: FakeGatedWorker, pair: list[FakeMortalEngine]
) -> None:
    async def main() -> None:
        gate.stops_at = "publish"
        sync = asyncio.create_task(lane.aio.sync(version=2))
        await stopped(gate)
        sync.cancel()
        asyncio.get_running_loop().call_later(0.2, gate.go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await sync

    asyncio.run(main())
    assert (lane.state.phase, lane.published_version) == ("published", 2)
    assert [engine.version for engine in pair] == [2, 2]
    assert lane.replicas[0].generate(PROMPT, max_tokens=1)[0].weight_version == 2


@pytest.mark.parametrize("cancellations", [1, 2])
def test_cancelled_before_its_turn_it_takes_its_turn_and_fails_there(
    lane: Lane, gate: FakeGatedWorker, pair: list[FakeMortalEngine], cancellations: int
) -> None:
    async def main() -> None:
        gate.stops_at = "publish"
        first = asyncio.create_task(lane.aio.sync(version=1))
        await stopped(gate)
        second = asyncio.create_task(lane.aio.sync(version=2))
        for _ in range(cancellations):
            await asyncio.sleep(0.05)
            second.cancel()
        # The second time it does not wait for its turn, and is given up there all the same.
        await asyncio.sleep(0.05)
        assert second.done() == (cancellations == 2)
        assert lane.state.syncs == 1
        gate.stops_again_at("load").set()
        assert (await first).version == 1
        asyncio.get_running_loop().call_later(0.5, gate.go_on.set)  # were it not interrupted, it would load
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await asyncio.to_thread(
            wait_until, lambda: (lane.state.syncs, lane.state.phase) == (2, "failed"), seconds=SECONDS
        )
        assert lane.state.last_error.startswith("SyncCancelledError")
        await lane.aio.sync(version=3)

    asyncio.run(main())
    assert (lane.state.syncs, lane.published_version) == (3, 3)
    assert [engine.version for engine in pair] == [3, 3]


def test_cancelled_before_its_turn_what_cannot_be_given_up_is_done(lane: Lane, gate: FakeGatedWorker) -> None:
    async def main() -> None:
        gate.stops_at = "load"
        stage = asyncio.create_task(lane.aio.stage(version=1))
        await stopped(gate)
        commit = asyncio.create_task(lane.aio.commit())
        await asyncio.sleep(0.05)
        commit.cancel()
        gate.go_on.set()
        await stage
        with pytest.raises(asyncio.CancelledError):
            await commit

    asyncio.run(main())
    assert (lane.state.phase, lane.published_version) == ("published", 1)


def test_a_plain_call_beside_an_awaited_one_is_refused_and_close_ends_it(
    lane: Lane, gate: FakeGatedWorker
) -> None:
    async def main() -> None:
        gate.stops_at = "load"
        sync = asyncio.create_task(lane.aio.sync(version=1))
        await stopped(gate)
        with pytest.raises(SyncError, match="while another call of it runs"):
            lane.sync(version=2)
        asyncio.get_running_loop().call_later(0.2, gate.go_on.set)
        await asyncio.to_thread(lane.close)
        with pytest.raises(SyncCancelledError, match="The lane is being closed"):
            await sync

    asyncio.run(main())
    assert lane.state.phase == "closed"


@pytest.fixture(scope="module")
def loop_outcomes(outcomes_of: Callable[..., list[RankOutcome]], engine: EngineProcess) -> list[RankOutcome]:
    return outcomes_of("async_loop", 2, [engine.address])


def test_an_async_rank_and_a_plain_one_sync_together_and_fail_together(
    loop_outcomes: list[RankOutcome],
) -> None:
    for version in (1, 2, 3, 5):
        assert [step.outcome for step in steps_named(loop_outcomes, f"plain {version}")] == ["ok"]
    (cancelled,) = steps_named(loop_outcomes, "plain 4")
    assert cancelled.type == "SyncCancelledError"
    assert "given up on rank 0" in cancelled.text
    (told,) = steps_named(loop_outcomes, "cancelled")
    assert told.facts == {"cancelled": [1], "phase": ["failed"]}


def test_a_queued_sync_that_is_given_up_on_one_rank_fails_on_all_and_the_next_is_the_same_on_all(
    loop_outcomes: list[RankOutcome],
) -> None:
    (told,) = steps_named(loop_outcomes, "timed out")
    assert told.facts == {"syncs": [6], "phase": ["failed"]}
    (cancelled,) = steps_named(loop_outcomes, "plain 6")
    assert cancelled.type == "SyncCancelledError"
    assert "given up on rank 0" in cancelled.text
    assert [step.outcome for step in steps_named(loop_outcomes, "plain 7")] == ["ok"]
    for state in steps_named(loop_outcomes, "end"):
        assert (state.facts["phase"], state.facts["published"]) == (["published"], [7])


def test_generation_beside_the_syncs_carries_whole_versions_only(loop_outcomes: list[RankOutcome]) -> None:
    (told,) = steps_named(loop_outcomes, "sampled")
    assert set(told.facts["versions"]) <= {1, 2, 3}
    assert 3 in told.facts["versions"]
