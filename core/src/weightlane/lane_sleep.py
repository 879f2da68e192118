"""Putting a lane's engines to sleep between syncs, and waking them; one verdict for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.agreement import put_outcome
from weightlane.control import CONTROLLER
from weightlane.errors import WeightlaneError
from weightlane.front.endpoint import ANSWER_SECONDS
from weightlane.lane_messages import Go

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.membership import Membership
    from weightlane.program import EngineCall, Program
    from weightlane.replica_session import ReplicaSession


class LaneSleep:
    """What `lane.sleep` and `lane.wake` do; every rank calls the same in the same order."""

    def __init__(self, members: Membership, channel: ControlChannel, bounds: Bounds) -> None:
        self._members = members
        self._channel = channel
        self._bounds = bounds
        self._calls = 0

    def sleep(self, version: int) -> None:
        """Every replica lets go of the memory that the lane manages; all ranks raise the first failure."""
        self._on_all(lambda session: session.sleep(version))

    def wake(self, version: int) -> None:
        """Every replica takes back what was released; all ranks raise the first failure."""
        self._on_all(lambda session: session.wake(version))

    def _on_all(self, step: Callable[[ReplicaSession], None]) -> None:
        self._calls += 1
        key = f"sleep/{self._calls}"
        self._channel.put(f"{key}/at/{self._channel.rank}", Go())
        if self._channel.rank == CONTROLLER:
            put_outcome(self._channel, key, lambda: self._each(key, step))
        self._channel.get(key, Go, seconds=self._patience(), awaited=(CONTROLLER,))

    def _patience(self) -> float:
        """All that the controller may wait for: a rank that gave up before it would raise another error."""
        start = self._bounds.start
        seconds = start  # until every rank is here
        for replica in self._members.plan.replicas:
            seconds += 2 * start + ANSWER_SECONDS  # the end of a failed sync, and what the replica holds
            seconds += sum(call.timeout_seconds + ANSWER_SECONDS for call in _calls(replica.program))
        return seconds

    def _each(self, key: str, step: Callable[[ReplicaSession], None]) -> Go:
        """A replica that fails keeps none of the others from being asked."""
        self._channel.gather(f"{key}/at", Go, seconds=self._bounds.start)
        self._forget(self._calls - 1)
        failures: list[WeightlaneError] = []
        for session in self._members.sessions:
            try:
                session.require_ended(self._bounds.start)
                if session.manages_memory:
                    session.adopt(session.residency(self._bounds.start))
                step(session)
            except WeightlaneError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return Go()

    def _forget(self, call: int) -> None:
        """Every rank is at the next call now, so each has read this one's verdict."""
        ranks = range(self._channel.world_size)
        self._channel.forget(f"sleep/{call}", *(f"sleep/{call}/at/{rank}" for rank in ranks))


def _calls(program: Program) -> Iterator[EngineCall]:
    """Every engine call that `sleep` or `wake` can make, of both at once: an upper bound of either."""
    yield from program.pause
    for memory in program.memory:
        yield memory.release
        yield memory.resume
    yield from program.resume
