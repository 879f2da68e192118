"""Only an engine that no sync has touched since it last published is let go after a failure."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from weightlane.bounds import Bounds
from weightlane.buckets import lay_out_buckets
from weightlane.errors import EngineError, SyncTimeoutError
from weightlane.manifest import Manifest
from weightlane.messages import Done, WireTensor, encode
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, EngineCall, Program, RequestMove
from weightlane.replica_session import ReplicaSession, cancel_all, take_steps
from weightlane.residency import ReplicaResidency, WorkerResidency
from weightlane.schedule import BEFORE_MOVE
from weightlane.types import Mode, Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = EngineCall("any")
WIRES = (WireTensor("w", (4,), "float32"),)


class FakePausableEndpoint:
    """An engine that can be paused and takes requests only; notes the routes that it was called on."""

    address = "http://fake"

    def __init__(self, fails_at: str = "") -> None:
        self.routes: list[str] = []
        self.fails_at = fails_at

    def call(self, call: EngineCall, *, version: int | None = None) -> str:
        self.routes.append(call.route)
        if call.route == self.fails_at:
            raise EngineError(f"{call.route} failed.")
        return ""

    def close(self) -> None:
        self.routes.append("close")


def session_of(endpoint: Any) -> ReplicaSession:
    replica = ReplicaPlan(
        replica=0,
        engine="fake",
        engine_version="1",
        address=endpoint.address,
        backend="fake",
        era="any",
        distribution="fake 1",
        evidence=(),
        notes=(),
        coverage="untraced",
        transport=TransportName.INLINE,
        incarnations={0: "a"},
        peers=(0,),
        program=Program(
            RequestMove("update", "payload", 1, "{}", "{}"),
            pause=(EngineCall("pause"),),
            publish=(EngineCall("publish"),),
            resume=(EngineCall("resume"),),
        ),
    )
    plan = LanePlan(
        lane="lane",
        mode=Mode.FULL,
        phase=Phase.FULL,
        world_size=1,
        trainer_backend="torch",
        manifest=Manifest(Phase.FULL, 1, ()),
        verify="counts",
        entries=(),
        tensors=WIRES,
        buckets=lay_out_buckets(WIRES),
        replicas=(replica,),
    )
    return ReplicaSession(plan, 0, endpoint, Bounds())


def nothing(_: BaseException) -> None:
    return None


def begun(session: ReplicaSession, sync: int) -> None:
    take_steps(BEFORE_MOVE, [session], sync)
    session.begin(sync, sync, nothing)


@pytest.fixture
def endpoint() -> FakePausableEndpoint:
    return FakePausableEndpoint()


def published(endpoint: FakePausableEndpoint) -> ReplicaSession:
    """A session that has written the engine whole, with nothing noted yet."""
    session = session_of(endpoint)
    session.publish(0, 0)
    endpoint.routes.clear()
    return session


def test_a_sync_that_failed_before_its_first_bucket_resumes_the_engine(
    endpoint: FakePausableEndpoint,
) -> None:
    session = published(endpoint)
    begun(session, 1)
    session.cancel(1, 1, "another replica refused")
    assert endpoint.routes == ["pause", "resume"]


def test_an_engine_that_this_lane_never_wrote_whole_is_not_let_go(endpoint: FakePausableEndpoint) -> None:
    """It cannot tell whether a trainer that died has left it paused and half-written."""
    session = session_of(endpoint)
    begun(session, 1)
    session.cancel(1, 1, "another replica refused")
    session.wake(1)
    session.close()
    assert endpoint.routes == ["pause", "close"]


def test_an_engine_that_says_it_is_not_whole_is_not_let_go(endpoint: FakePausableEndpoint) -> None:
    session = published(endpoint)
    told = WorkerResidency(0, "a", servable=False, cause="a sync failed")
    agents = structs.replace(
        session._replica, program=Program(AgentMove("inline"), pause=(CALL,), resume=(CALL,))
    )
    session._replica = agents
    session.adopt(ReplicaResidency(0, endpoint.address, (told,)))
    take_steps(["pause"], [session], 1)
    session.wake(1)
    assert endpoint.routes == ["any"]
    session.adopt(ReplicaResidency(0, endpoint.address, (structs.replace(told, servable=True),)))
    assert session._dirty, "another trainer's word does not make this lane's weights whole"


def test_a_resume_that_may_have_been_obeyed_is_paused_again(endpoint: FakePausableEndpoint) -> None:
    session = published(endpoint)
    begun(session, 1)
    endpoint.fails_at = "resume"
    session.cancel(1, 1, "another replica refused")
    endpoint.fails_at = ""
    begun(session, 2)
    begun(session, 3)
    assert endpoint.routes == ["pause", "resume", "pause"]


def test_the_next_sync_waits_for_the_end_of_a_failed_one() -> None:
    go_on = threading.Event()

    class FakeSlowEndpoint(FakePausableEndpoint):
        def call(self, call: EngineCall, *, version: int | None = None) -> str:
            if call.route == "resume":
                go_on.wait(30)
            return super().call(call, version=version)

    endpoint = FakeSlowEndpoint()
    session = published(endpoint)
    begun(session, 1)
    cancel_all([session], 1, 1, "cause", 0.1)
    with pytest.raises(SyncTimeoutError, match="still ending the last sync"):
        session.require_ended(0.1)
    go_on.set()
    session.require_ended(30)
    begun(session, 2)
    assert endpoint.routes == ["pause", "resume", "pause"]


@pytest.mark.requirement("R68", part="full weights")
def test_a_touched_engine_stays_paused_through_a_later_sync_that_fails_early(
    endpoint: FakePausableEndpoint,
) -> None:
    session = session_of(endpoint)
    begun(session, 1)
    session.touched()
    session.cancel(1, 1, "a bucket failed")
    session.cancel(2, 2, "ranks asked for different versions")
    begun(session, 3)
    session.cancel(3, 3, "another replica refused")
    session.close()
    assert endpoint.routes == ["pause", "close"]


class FakeAgents(FakePausableEndpoint):
    """The same with an agent in its one worker, which says whether it holds a whole version."""

    servable = True

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        return [encode(Done(0))]

    def residency(self, backend: str, lane: str, timeout_seconds: float) -> tuple[WorkerResidency, ...]:
        return (WorkerResidency(0, "a", servable=self.servable),)


def with_agents(servable: bool) -> tuple[ReplicaSession, FakeAgents]:
    endpoint = FakeAgents()
    endpoint.servable = servable
    session = session_of(endpoint)
    program = structs.replace(session._replica.program, move=AgentMove("inline"))
    session._replica = structs.replace(session._replica, program=program)
    session._dirty = False  # agents tell how it is
    return session, endpoint


@pytest.mark.parametrize("whole", [True, False])
def test_agents_tell_whether_a_sync_that_failed_wrote_anything(whole: bool) -> None:
    session, endpoint = with_agents(servable=whole)
    begun(session, 1)
    session.touched()
    session.cancel(1, 1, "the first bucket failed")
    assert endpoint.routes == (["pause", "resume"] if whole else ["pause"])


def test_whole_weights_do_not_tell_of_caches_once_a_publication_was_begun() -> None:
    session, endpoint = with_agents(servable=True)
    begun(session, 1)
    session.touched()
    endpoint.fails_at = "publish"
    with pytest.raises(EngineError):
        session.publish(1, 1)
    session.cancel(1, 1, "a cache was not emptied")
    begun(session, 2)
    session.touched()
    session.cancel(2, 2, "the first bucket failed")
    assert endpoint.routes == ["pause", "publish"]


def test_a_published_version_lets_it_go(endpoint: FakePausableEndpoint) -> None:
    session = session_of(endpoint)
    begun(session, 1)
    session.touched()
    session.cancel(1, 1, "a bucket failed")
    begun(session, 2)
    session.touched()
    session.publish(2, 2)
    session.resume(2)
    assert endpoint.routes == ["pause", "publish", "resume"]


def test_an_interrupted_lane_lets_an_untouched_engine_go_when_it_closes(
    endpoint: FakePausableEndpoint,
) -> None:
    session = published(endpoint)
    begun(session, 1)
    session.close()
    assert endpoint.routes == ["pause", "resume", "close"]


def test_all_replicas_are_cancelled_at_once_within_one_bound() -> None:
    class FakeSlowSession(ReplicaSession):
        def __init__(self, wait: Callable[[], object]) -> None:
            self.wait = wait

        def cancel(self, sync: int, version: int, cause: str) -> None:
            self.wait()

    never = threading.Event()
    sessions: Any = [FakeSlowSession(lambda: never.wait(30)) for _ in range(3)]
    started = time.monotonic()
    cancel_all(sessions, 1, 1, "cause", 0.5)
    assert time.monotonic() - started < 5
    never.set()
