"""One sync on one rank, from its start to its publication or its end.

A sync has three verdicts, each the controller's and each the same on every rank: that it begins, that it is
staged, that it is committed. A rank that is interrupted or fails tells the controller and takes its verdict.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from weightlane.control import CONTROLLER
from weightlane.errors import ControlLostError, SyncCancelledError, SyncError, WeightlaneError
from weightlane.failures import failure_of
from weightlane.lane_messages import Committed, RankMoved, SyncGo, SyncReport
from weightlane.moving import move_buckets
from weightlane.replica_session import cancel_all
from weightlane.starting import RANK_STEPS, STEPS, StartProcedure
from weightlane.sync_failure import SyncProgress, diagnosed, first_cause, partly_published, with_consequence
from weightlane.transports.sink import SinkBounds
from weightlane.verify import verify_ranks, verify_replica

if TYPE_CHECKING:
    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.events import EventSource
    from weightlane.membership import Membership
    from weightlane.replica_session import ReplicaSession
    from weightlane.stream import ExportStream

_CANCEL_SECONDS = 15.0
_VERDICT_SECONDS = 2.0
_T = TypeVar("_T")


class SyncRun:
    """The steps of one sync; made by the lane, for whom it also says how far it came.

    Args:
        members: who takes part.
        channel: this rank's end of the control channel.
        bounds: the lane's bounds.
        events: where steps are told.
        sync: its number.
        version: what is moved.
    """

    def __init__(
        self,
        members: Membership,
        channel: ControlChannel,
        bounds: Bounds,
        events: EventSource,
        *,
        sync: int,
        version: int,
    ) -> None:
        self._members = members
        self._channel = channel
        self._bounds = bounds
        self._events = events
        self.sync = sync
        self.version = version
        self.progress: SyncProgress = "starting"
        self.go = SyncGo()
        self.published: list[int] = []
        self._decided: set[str] = set()
        self._abort_name = f"sync-{sync}"
        plan = members.plan
        self._patience = bounds.whole_sync(len(plan.buckets), len(plan.replicas))

    # -- the two halves -------------------------------------------------------------------------------------

    def stage(self, before: SyncReport | None) -> SyncReport:
        """Moves and verifies; `before` is what was last published, for the stale alarm."""
        started = time.monotonic()
        if self._is_controller:
            self._forget(self.sync - 2)
        with ExitStack() as export:
            stream = self._start(export)
            self.progress = "moving"
            moved = self._move(stream)
        self._channel.put(f"sync/{self.sync}/moved/{self._rank}", moved)
        if self._is_controller:
            self._decide("staged", self._verified(before, started))
        return self._verdict("staged", SyncReport)

    def commit(self) -> None:
        """Publishes on every replica that took part, then lets generation go on."""
        self.progress = "committing"
        if self._is_controller:
            self._publish()
            self._decide("committed", Committed(self.version))
        self._verdict("committed", Committed)

    def interrupt(self, why: str) -> bool:
        """Has this sync fail on all ranks, if it is not staged yet; may be called from another thread.

        False where it is too late: a staged version is committed or left to the caller, never torn.
        """
        if self.progress == "committing" or "staged" in self._decided:
            return False
        self._channel.abort(
            self._abort_name,
            SyncCancelledError(
                f"Sync {self.sync} (version {self.version}) was given up on rank {self._rank}.",
                why,
                "Sync again when the rank is ready to.",
            ),
        )
        return True

    # -- steps ------------------------------------------------------------------------------------------

    def _start(self, export: ExitStack) -> ExportStream:
        opened: list[ExportStream] = []

        def ready() -> None:
            if self._members.broken_by:
                raise SyncError(
                    f"The collective group of lane {self._members.plan.lane} was broken in sync "
                    f"{self._members.broken_by}.",
                    "A rank left that sync's collectives before their end.",
                    "Close the lane and connect again.",
                )
            opened.append(export.enter_context(self._members.mover.open_stream()))

        self.go = StartProcedure(
            self._members,
            self._channel,
            self._bounds,
            sync=self.sync,
            version=self.version,
            patience=self._patience,
            abort=self._abort_name,
        ).run(ready)
        return opened[0]

    def _move(self, stream: ExportStream) -> RankMoved:
        bounds = SinkBounds(
            bucket_seconds=self._bounds.bucket,
            lost_after=self._bounds.lost_after,
            check=self._check,
        )
        started = time.monotonic()
        plan = self._members.plan
        mover = self._members.mover.without(self._missing)
        self._members.broken_by = self.sync if stream.collective else 0
        outcome = move_buckets(
            mover,
            stream,
            plan,
            self.sync,
            self.version,
            bounds,
            lambda nbytes: self._events.tell("bucket-moved", self.version, nbytes=nbytes),
        )
        self._members.broken_by = 0
        if outcome.failure is not None:
            raise outcome.failure
        fed = len(mover.sinks)
        return RankMoved(
            rank=self._rank,
            tensors=len(plan.tensors) * fed,
            nbytes=plan.nbytes * fed,
            digest=outcome.digest,
            seconds=time.monotonic() - started,
        )

    def _verified(self, before: SyncReport | None, started: float) -> SyncReport:
        """Every worker's report of every replica, compared; what follows the move runs after that."""
        plan = self._members.plan
        moved = self._channel.gather(
            f"sync/{self.sync}/moved", RankMoved, seconds=self._patience, abort=self._abort_name
        )
        digest = verify_ranks(plan, moved)
        reports = []
        for session in self._sessions:
            replica = plan.replicas[session.number]
            workers = session.reports(self.sync, self._check)
            reports.append(
                verify_replica(plan, replica, moved, workers, sync=self.sync, version=self.version)
            )
            told = f"{replica.address}: {reports[-1].verified}"
            self._events.tell("replica-reported", self.version, detail=told)
        for session in self._sessions:
            session.settle(self.version)
        self._channel.check_abort(self._abort_name)
        return SyncReport(
            lane=plan.lane,
            sync=self.sync,
            version=self.version,
            tensors=len(plan.tensors),
            nbytes=plan.nbytes,
            buckets=len(plan.buckets),
            seconds=time.monotonic() - started,
            digest=digest,
            unchanged_since=before.version if before and digest and before.digest == digest else None,
            replicas=tuple(reports),
            missing=self.go.missing,
            rejoined=tuple(item.replica for item in self.go.rejoining),
        )

    def _publish(self) -> None:
        served: list[str] = []
        try:
            for session in self._sessions:
                session.publish(self.sync, self.version)
                served.append(session.address)
                self.published.append(session.number)
            for session in self._sessions:
                session.resume(self.version)
        except WeightlaneError as error:
            raise partly_published(error, self.version, served) from error

    # -- failing together -------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> BaseException:
        """Tells everyone, ends this rank's part, and gives the error to raise: the first cause of all."""
        if not isinstance(error, Exception):
            self._channel.abort(self._abort_name, error)
            self._end(f"rank {self._rank} was interrupted", error)
            return error
        patience = self._bounds.lost_after + 2.0 if self._members.plan.manifest.collective else 0.0
        cause = diagnosed(error, self.sync, self._rank, patience, self._check)
        self._channel.abort(self._abort_name, cause)
        first = first_cause(self._channel, self._abort_name, cause)
        self._end(str(first), first)
        self._events.tell("sync-failed", self.version, detail=str(first))
        return with_consequence(first, self.sync, self.version, self.progress)

    def _end(self, cause: str, error: BaseException) -> None:
        if self._is_controller:
            # Whoever waits for a verdict of this sync gets this one.
            with contextlib.suppress(ControlLostError):
                for step in ("staged", "committed"):
                    if step not in self._decided:
                        self._channel.put(
                            f"sync/{self.sync}/{step}", failure_of(error, origin=f"rank {self._rank}")
                        )
        self._members.mover.abort(cause, sync=self.sync)
        cancel_all(self._sessions, self.sync, self.version, cause, _CANCEL_SECONDS)

    def _check(self) -> None:
        self._channel.check_abort(self._abort_name)
        self._channel.check_alive(range(self._channel.world_size) if self._is_controller else (CONTROLLER,))

    # -- small things -----------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self._channel.rank

    @property
    def _is_controller(self) -> bool:
        return self._rank == CONTROLLER

    @property
    def _missing(self) -> frozenset[int]:
        return frozenset(item.replica for item in self.go.missing)

    @property
    def _sessions(self) -> tuple[ReplicaSession, ...]:
        return self._members.taking_part(self._missing)

    def _decide(self, step: str, verdict: SyncReport | Committed) -> None:
        self._decided.add(step)
        self._channel.put(f"sync/{self.sync}/{step}", verdict)

    def _verdict(self, step: str, kind: type[_T]) -> _T:
        """The controller's word, which may take as long as all that the controller waits for.

        An abort ends the wait, unless the verdict had been given before: then the verdict counts, so that no
        rank takes for failed what the others take for done.
        """
        key = f"sync/{self.sync}/{step}"
        try:
            return self._channel.get(
                key, kind, seconds=self._patience, awaited=(CONTROLLER,), abort=self._abort_name
            )
        except ControlLostError:
            raise
        except WeightlaneError as cause:
            if self._is_controller:
                raise
            return self._verdict_after(key, kind, cause)

    def _verdict_after(self, key: str, kind: type[_T], cause: WeightlaneError) -> _T:
        seconds = self._bounds.lost_after + _VERDICT_SECONDS
        try:
            return self._channel.get(key, kind, seconds=seconds, awaited=(CONTROLLER,))
        except WeightlaneError as verdict:
            raise cause from verdict

    def _forget(self, sync: int) -> None:
        if sync > 0:
            ranks = range(self._channel.world_size)
            self._channel.forget(
                *(f"sync/{sync}/{step}" for step in (*STEPS, "staged", "committed")),
                *(f"sync/{sync}/{step}/{rank}" for step in (*RANK_STEPS, "moved") for rank in ranks),
                f"abort/sync-{sync}",
                f"abort/sync-{sync}/first",
            )
