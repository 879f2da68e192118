"""One sync on one rank, from its start to its publication or its end.

A sync has three verdicts, each the controller's and each the same on every rank: that it begins, that it is
staged, that it is committed. A rank that is interrupted or fails tells the controller and takes its verdict.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from weightlane.agreement import put_outcome
from weightlane.control import CONTROLLER
from weightlane.errors import SyncCancelledError, SyncError, WeightlaneError
from weightlane.lane_messages import Committed, Go, RankMoved, SyncGo, SyncReport
from weightlane.moving import move_buckets
from weightlane.replica_session import cancel_all, take_steps
from weightlane.schedule import AFTER_MOVE
from weightlane.starting import StartProcedure
from weightlane.sync_failure import SyncProgress, diagnosed, first_cause, partly_published, with_consequence
from weightlane.sync_verdicts import SyncVerdicts
from weightlane.trainer_memory import loaded
from weightlane.transports.sink import SinkBounds
from weightlane.verify import verify_ranks, verify_replica, with_read_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.events import EventSource
    from weightlane.lane_messages import ReplicaReport
    from weightlane.membership import Membership
    from weightlane.replica_session import ReplicaSession
    from weightlane.stream import ExportStream

_CANCEL_SECONDS = 15.0


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
        self._decided = False
        self._abort_name = f"sync-{sync}"
        plan = members.plan
        self._patience = bounds.whole_sync(plan.bucket_waits, len(plan.replicas))
        self._verdicts = SyncVerdicts(
            channel, sync, abort=self._abort_name, patience=self._patience, grace=bounds.lost_after
        )

    # -- the two halves -------------------------------------------------------------------------------------

    def stage(self, before: SyncReport | None) -> SyncReport:
        """Moves and verifies; `before` is what was last published, for the stale alarm."""
        started = time.monotonic()
        if self._is_controller:
            self._verdicts.forget_before()
        with ExitStack() as export:
            stream = self._start(export)
            self.progress = "moving"
            with loaded(stream, self._members.plan.trainer_lifecycle, self._agree_loaded):
                moved = self._move(stream)
        self._channel.put(f"sync/{self.sync}/moved/{self._rank}", moved)
        if self._is_controller:
            self._verdicts.put("staged", self._verified(before, started))
        report = self._verdicts.get("staged", SyncReport)
        self._decided = True
        return report

    def commit(self) -> None:
        """Publishes on every replica that took part, then lets generation go on."""
        self.progress = "committing"
        # A name of its own: an abort of the stage that came too late is none of the commit.
        self._abort_name = self._verdicts.abort = f"commit-{self.sync}"
        if self._is_controller:
            self._publish()
            self._verdicts.put("committed", Committed(self.version))
        self._verdicts.get("committed", Committed)
        self._members.mover.published(self.sync)

    def interrupt(self, why: str) -> bool:
        """Has this sync fail on all ranks, if it is not staged yet; may be called from another thread.

        False where it is too late: a staged version is committed or left to the caller, never torn.
        """
        if self._decided or self._verdicts.given("staged"):
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
            opened.append(export.enter_context(self._members.mover.open_stream(self._check)))

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
        mover = self._members.mover_without(self._missing)
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

    def _agree_loaded(self, load: Callable[[], Go]) -> None:
        """No rank asks for a bucket before every rank has loaded what it exports."""
        put_outcome(self._channel, f"sync/{self.sync}/onload/{self._rank}", load)
        if self._is_controller:

            def all_loaded() -> Go:
                name = f"sync/{self.sync}/onload"
                self._channel.gather(name, Go, seconds=self._bounds.start, abort=self._abort_name)
                return Go()

            put_outcome(self._channel, f"sync/{self.sync}/loaded", all_loaded)
        self._verdicts.get("loaded", Go)

    def _verified(self, before: SyncReport | None, started: float) -> SyncReport:
        """Every worker's report of every replica, compared; what follows the move runs after that."""
        plan = self._members.plan
        moved = self._channel.gather(
            f"sync/{self.sync}/moved", RankMoved, seconds=self._patience, abort=self._abort_name
        )
        digest = verify_ranks(plan, moved)
        reports: list[ReplicaReport] = []
        for session in self._sessions:
            replica = plan.replicas[session.number]
            workers = session.reports(self.sync, self._check)
            reports.append(
                verify_replica(plan, replica, moved, workers, sync=self.sync, version=self.version)
            )
            if session.read_back is None:
                self._tell(reports[-1])
        take_steps(AFTER_MOVE, self._sessions, self.version)
        for number, session in enumerate(self._sessions):
            if session.read_back is not None:
                # Only now: an engine may go on with its weights until it has settled.
                reports[number] = with_read_back(reports[number], session.read_back_equal())
                self._tell(reports[number])
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

    def _tell(self, report: ReplicaReport) -> None:
        self._events.tell("replica-reported", self.version, detail=f"{report.address}: {report.verified}")

    def _publish(self) -> None:
        served: list[str] = []
        try:
            self._require_what_was_staged()
            for session in self._sessions:
                session.publish(self.sync, self.version)
                served.append(session.address)
                self.published.append(session.number)
            for session in self._sessions:
                session.resume(self.version)
        except WeightlaneError as error:
            raise partly_published(error, self.version, served) from error

    def _require_what_was_staged(self) -> None:
        """Every replica asked again: one that was made anew, or let its weights go, holds no staged version.

        Raises:
            SyncError: names each such replica; nothing has been published.
            WeightlaneError: a replica does not answer.
        """
        plan = self._members.plan
        others: list[str] = []
        # A missing one that hangs would have every commit wait for it in vain.
        for answer in self._members.ask(self._bounds.start, missing=self._missing):
            if answer.error is not None:
                raise answer.error
            gone = any("weights" in worker.released for worker in answer.workers)
            if gone or not answer.is_as_planned(plan.replicas[answer.replica], plan.digest()):
                others.append(str(answer))
        if others:
            raise SyncError(
                f"Version {self.version} was staged and is not published: {'; '.join(others)}.",
                "Since it was staged, that engine was started anew, lost its plan or let its weights go.",
                "Sync again; nothing was published.",
            )

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
        return with_consequence(
            first, self.sync, self.version, self.progress, self._members.plan.receivers_in_failure
        )

    def _end(self, cause: str, error: BaseException) -> None:
        if self._is_controller:
            self._verdicts.refuse(error)
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
