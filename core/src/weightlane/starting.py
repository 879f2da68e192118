"""How a sync starts: every rank agrees, every replica is asked what it holds, one that came back joins again.

Nothing has been written anywhere, and no collective has begun, until all of this is done. One verdict, the
controller's, says whether the sync begins; nobody acts on anything else until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from weightlane.agreement import put_outcome
from weightlane.control import CONTROLLER
from weightlane.errors import EngineDeadError, SyncError, SyncTimeoutError, WeightlaneError
from weightlane.lane_messages import (
    Go,
    MissingReplica,
    NeedsBase,
    Ready,
    SyncGo,
    SyncStart,
)
from weightlane.membership import close_rings, open_rings
from weightlane.rejoin import plan_with, rejoining
from weightlane.replica_session import take_steps
from weightlane.schedule import BEFORE_MOVE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.membership import Membership
    from weightlane.planning import OpenReplica
    from weightlane.rejoin import PlanBasis
    from weightlane.replica_session import ReplicaSession
    from weightlane.residency import ReplicaResidency
    from weightlane.sync_verdicts import SyncPart
    from weightlane.transports.ring_sink import RingSink
    from weightlane.transports.sink import Sink

_T = TypeVar("_T")


class StartProcedure:
    """One rank's way to the first bucket of one sync.

    Args:
        members: who takes part; exchanged here when a replica came back.
        channel: this rank's end of the control channel.
        bounds: the lane's bounds.
        sync: the sync's number.
        version: what this rank was asked to move.
        patience: how long a rank waits for the controller's word.
        abort: the name of this sync's abort.
        part: which part of the sync. `base` begins on the replicas alone that do not hold the base.
    """

    def __init__(
        self,
        members: Membership,
        channel: ControlChannel,
        bounds: Bounds,
        *,
        sync: int,
        version: int,
        patience: float,
        abort: str,
        part: SyncPart = "sync",
    ) -> None:
        self._members = members
        self._channel = channel
        self._bounds = bounds
        self._sync = sync
        self._version = version
        self._patience = patience
        self._abort = abort
        self._part = part
        self._opened: list[OpenReplica] = []
        self._rings: list[RingSink] = []
        self._answers: dict[int, ReplicaResidency] = {}

    def run(self, ready: Callable[[], None]) -> SyncGo:
        """Returns when this rank may iterate its export; `ready` is what it must be able to do first.

        Raises:
            WeightlaneError: the first thing that keeps any rank or replica from starting, on every rank.
        """
        try:
            return self._run(ready)
        except BaseException:
            self._undo()
            raise

    def _run(self, ready: Callable[[], None]) -> SyncGo:
        def started() -> SyncStart:
            ready()
            return SyncStart(self._version, self._members.plan.digest(), self._members.joined)

        put_outcome(self._channel, f"{self._part}/{self._sync}/start/{self._channel.rank}", started)
        if self._is_controller:
            put_outcome(self._channel, f"{self._part}/{self._sync}/go", self._decide)
        go = self._verdict("go", SyncGo)
        if go.rejoining:
            self._take_back(go)
            if self._is_controller:
                name = f"{self._part}/{self._sync}/begun"
                put_outcome(self._channel, name, lambda: self._begin(self._asked_again(go)))
            return self._verdict("begun", SyncGo)
        return go

    # -- the controller's verdict ---------------------------------------------------------------------------

    def _decide(self) -> SyncGo:
        starts = self._channel.gather(
            f"{self._part}/{self._sync}/start", SyncStart, seconds=self._bounds.start, abort=self._abort
        )
        self._require_agreement(starts)
        answers = self._members.ask(self._bounds.start)
        self._answers = {answer.replica: answer for answer in answers if answer.error is None}
        missing = self._missing(answers)
        numbers = {item.replica for item in missing}
        back = [
            answer.replica
            for answer in answers
            if answer.replica not in numbers and self._must_join(answer, starts)
        ]
        if back:
            for number in back:
                self._opened.append(self._basis.reopen(number))
            self._basis.require_same_plan(self._members.plan, self._opened)
        go = SyncGo(rejoining(self._opened), missing, self._needs_base(numbers))
        return go if back else self._begin(go)

    def _asked_again(self, go: SyncGo) -> SyncGo:
        """Replicas that joined tell only now which base they hold: they were given it to compare."""
        if self._part != "base":
            return go
        missing = {item.replica for item in go.missing}
        answers = self._members.ask(self._bounds.start, missing=missing)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        self._answers = {answer.replica: answer for answer in answers}
        return msgspec.structs.replace(go, needs_base=self._needs_base(missing))

    def _needs_base(self, missing: Collection[int]) -> tuple[NeedsBase, ...]:
        trained = self._members.plan.trained_on
        if self._part != "base" or trained is None:
            return ()
        told = {
            number: answer.why_no_base(trained.identity)
            for number, answer in self._answers.items()
            if number not in missing
        }
        return tuple(NeedsBase(number, why) for number, why in told.items() if why)

    def _require_agreement(self, starts: Sequence[SyncStart]) -> None:
        asked = {rank: start.version for rank, start in enumerate(starts)}
        if len(set(asked.values())) > 1 or len({start.plan_digest for start in starts}) > 1:
            told = ", ".join(f"rank {rank} version {value}" for rank, value in asked.items())
            raise SyncError(
                f"The ranks do not agree on sync {self._sync}: {told}.",
                "Every rank must call sync with the same version in the same order.",
                "Check the loop that calls sync.",
            )

    def _missing(self, answers: Sequence[ReplicaResidency]) -> tuple[MissingReplica, ...]:
        """The replicas to go on without, where the lane's policy allows it.

        Raises:
            WeightlaneError: a replica does not answer and the policy is to fail; or none is left; or one
                answers with an error, which is no absence.
        """
        plan = self._members.plan
        gone = [answer for answer in answers if isinstance(answer.error, EngineDeadError | SyncTimeoutError)]
        for answer in answers:
            if answer.error is not None and answer not in gone:
                raise answer.error
        if gone and (plan.missing_replicas == "fail" or len(gone) == len(answers)):
            cause = gone[0].error
            if not isinstance(cause, WeightlaneError):
                raise AssertionError("both kinds looked for above are weightlane's own")
            others = "".join(f" So is it with {answer.address}." for answer in gone[1:])
            raise cause.adding(
                f"Replica {gone[0].replica} of lane {plan.lane} was asked what it holds before sync "
                f"{self._sync}.{others}"
            )
        return tuple(MissingReplica(answer.replica, answer.address, str(answer.error)) for answer in gone)

    def _must_join(self, answer: ReplicaResidency, starts: Sequence[SyncStart]) -> bool:
        plan = self._members.plan
        number = answer.replica
        here = self._members.joined
        same_rings = all(start.joined[number : number + 1] == here[number : number + 1] for start in starts)
        return not same_rings or not answer.is_as_planned(plan.replicas[number], plan.digest())

    def _begin(self, go: SyncGo) -> SyncGo:
        """Takes every replica's steps before the move and, over rings, starts the long receive calls."""
        missing = {item.replica for item in go.missing}
        sessions = self._members.taking_part(self._members.absent(go))
        for session in self._members.sessions:
            if session.number in missing:
                session.touched()
        for session in sessions:
            session.require_ended(self._bounds.start)
        for session in sessions:
            if session.number in self._answers:
                session.adopt(self._answers[session.number])
        take_steps(BEFORE_MOVE, sessions, self._version)
        for session in sessions:
            session.begin(self._sync, self._version, lambda error: self._channel.abort(self._abort, error))
        self._channel.check_abort(self._abort)
        for session in sessions:
            session.touched()
        return go

    # -- a replica comes back -------------------------------------------------------------------------------

    def _take_back(self, go: SyncGo) -> None:
        """New rings on the ranks that feed it, the plan to its workers, then all exchange at once."""
        numbers = {item.replica for item in go.rejoining}

        def rings() -> Ready:
            open_rings(plan_with(self._members.plan, go.rejoining), self._channel, numbers, self._rings)
            return Ready(tuple(ring.place for ring in self._rings))

        put_outcome(self._channel, f"{self._part}/{self._sync}/rings/{self._channel.rank}", rings)
        sessions: list[ReplicaSession] = []
        if self._is_controller:
            put_outcome(
                self._channel, f"{self._part}/{self._sync}/joined", lambda: self._attach(go, sessions)
            )
        self._verdict("joined", Go)
        sinks: list[tuple[int, Sink]] = [(ring.replica, ring) for ring in self._rings]
        for ring in self._rings:
            ring.attached()
        sinks += self._controller_sinks(go, sessions)
        self._members.exchange(self._sync, go.rejoining, sinks, sessions, self._opened)
        self._rings, self._opened = [], []

    def _attach(self, go: SyncGo, sessions: list[ReplicaSession]) -> Go:
        from weightlane.replica_session import ReplicaSession

        ready = self._channel.gather(
            f"{self._part}/{self._sync}/rings", Ready, seconds=self._bounds.start, abort=self._abort
        )
        plan = plan_with(self._members.plan, go.rejoining)
        folder = self._members.mover.folder
        for replica in self._opened:
            session = ReplicaSession(
                plan, replica.number, replica.endpoint, self._bounds, tables=replica.tables
            )
            session.attach([place for item in ready for place in item.rings], folder.path if folder else "")
            sessions.append(session)
        return Go()

    def _controller_sinks(self, go: SyncGo, sessions: Sequence[ReplicaSession]) -> list[tuple[int, Sink]]:
        from weightlane.transports.choice import controller_sink

        plan = plan_with(self._members.plan, go.rejoining)
        sinks: list[tuple[int, Sink]] = []
        for session in sessions:
            sink = controller_sink(plan, session.number, session.endpoint, session.read_back, session.adapter)
            if sink is not None:
                sinks.append((session.number, sink))
        return sinks

    # -- small things -----------------------------------------------------------------------------------

    @property
    def _is_controller(self) -> bool:
        return self._channel.rank == CONTROLLER

    @property
    def _basis(self) -> PlanBasis:
        basis = self._members.basis
        if basis is None:
            raise AssertionError("only the controller asks for it, and it has one")
        return basis

    def _verdict(self, step: str, kind: type[_T]) -> _T:
        from weightlane.sync_verdicts import SyncVerdicts  # here: it imports this module

        verdicts = SyncVerdicts(
            self._channel,
            self._sync,
            abort=self._abort,
            patience=self._patience,
            part=self._part,
            grace=self._bounds.lost_after,
        )
        return verdicts.get(step, kind)

    def _undo(self) -> None:
        close_rings(self._channel, self._rings)
        # Their workers may hold rings that are closed now: they join anew before the next sync.
        self._members.distrust({replica.number for replica in self._opened})
        kept = {session.endpoint for session in self._members.sessions}
        for replica in self._opened:
            if replica.endpoint not in kept:
                replica.endpoint.close()


STEPS = ("go", "joined", "begun")
"""Keys of a sync's start that the controller puts once; it forgets them two syncs later."""
RANK_STEPS = ("start", "rings")
"""Keys that every rank puts."""
