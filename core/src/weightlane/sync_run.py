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
from weightlane.plan import FENCED
from weightlane.replica_session import cancel_all
from weightlane.starting import StartProcedure
from weightlane.stream import TellsRounding
from weightlane.sync_failure import SyncProgress, diagnosed, first_cause, partly_published, with_consequence
from weightlane.sync_publishing import publish_everywhere, require_what_was_staged
from weightlane.sync_report import report_of, verified_replicas
from weightlane.sync_verdicts import SyncPart, SyncVerdicts
from weightlane.trainer_memory import loaded
from weightlane.transports.sink import SinkBounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.events import EventSource
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
        part: which part of the sync. `base` goes to the replicas alone that do not hold the base.
        base: the part that comes first, if there is one: what it has staged is committed, or fails, with this
            one.
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
        part: SyncPart = "sync",
        base: SyncRun | None = None,
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
        self.report: SyncReport | None = None
        self._decided = False
        self._part: SyncPart = part
        self._base = base
        self._abort_name = f"{part}-{sync}"
        plan = members.plan
        self._patience = bounds.whole_sync(plan.bucket_waits, len(plan.replicas))
        self._verdicts = SyncVerdicts(
            channel,
            sync,
            abort=self._abort_name,
            patience=self._patience,
            grace=bounds.lost_after,
            part=part,
        )

    # -- the two halves -------------------------------------------------------------------------------------

    def stage(self, before: SyncReport | None) -> SyncReport | None:
        """Moves and verifies; `before` is what was last published, for the stale alarm.

        None where nobody needs anything: every replica holds the base. That is decided with the start.
        """
        started = time.monotonic()
        if self._is_controller:
            self._verdicts.forget_before()
        with ExitStack() as export:
            stream = self._start(export)
            if len(self._absent) == len(self._members.plan.replicas):
                self._decided = True
                return None
            self.progress = "moving"
            with loaded(stream, self._members.plan.trainer_lifecycle, self._agree_loaded):
                moved = self._move(stream)
        self._channel.put(self._key(f"moved/{self._rank}"), moved)
        if self._is_controller:
            self._verdicts.put("staged", self._verified(before, started))
        self.report = self._verdicts.get("staged", SyncReport)
        self._decided = True
        return self.report

    def commit(self) -> None:
        """Publishes on every replica that took part, then lets generation go on; the base part with it."""
        self.progress = "committing"
        # A name of its own: an abort of the stage that came too late is none of the commit.
        self._abort_name = self._verdicts.abort = f"commit-{self.sync}"
        if self._is_controller:
            self._publish()
            self._verdicts.put("committed", Committed(self.version))
        self._verdicts.get("committed", Committed)
        self._members.mover.published(self.sync)
        if self._base is not None and self._base.report is not None:
            self._base.progress = "committing"
            self._base._members.mover.published(self.sync)

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
            part=self._part,
        ).run(ready)
        if self._part == "sync":
            written = self._base.sessions if self._base is not None and self._base.report else ()
            numbers = {session.number for session in written}
            for session in self._members.sessions:
                session.over_base_sent = session.number in numbers
        return opened[0]

    def _move(self, stream: ExportStream) -> RankMoved:
        bounds = SinkBounds(
            bucket_seconds=self._bounds.bucket,
            lost_after=self._bounds.lost_after,
            check=self._check,
        )
        started = time.monotonic()
        plan = self._members.plan
        mover = self._members.mover_without(self._absent)
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
            update_lost=stream.update_lost if isinstance(stream, TellsRounding) else None,
        )

    def _agree_loaded(self, load: Callable[[], Go]) -> None:
        """No rank asks for a bucket before every rank has loaded what it exports."""
        put_outcome(self._channel, self._key(f"onload/{self._rank}"), load)
        if self._is_controller:

            def all_loaded() -> Go:
                name = self._key("onload")
                self._channel.gather(name, Go, seconds=self._bounds.start, abort=self._abort_name)
                return Go()

            put_outcome(self._channel, self._key("loaded"), all_loaded)
        self._verdicts.get("loaded", Go)

    def _verified(self, before: SyncReport | None, started: float) -> SyncReport:
        plan, key = self._members.plan, self._key("moved")
        moved = self._channel.gather(key, RankMoved, seconds=self._patience, abort=self._abort_name)
        replicas = verified_replicas(
            plan, self.sessions, moved, self._events, self._check, sync=self.sync, version=self.version
        )
        self._channel.check_abort(self._abort_name)
        earlier = self._base.report.phases if self._base and self._base.report else ()
        numbers = {"sync": self.sync, "version": self.version}
        return report_of(plan, self.go, moved, replicas, before, earlier, **numbers, started=started)

    def _publish(self) -> None:
        try:
            require_what_was_staged(self._members, self._absent, self._bounds.start, version=self.version)
        except WeightlaneError as error:
            raise partly_published(error, self.version, ()) from error
        under = self._base.sessions if self._base and self._base.report else ()
        publish_everywhere(self.sessions, under, self.published, sync=self.sync, version=self.version)
        bases = self._base._members.sessions if self._base is not None else ()
        labelled = {session.number for session in self.sessions if session.labels}
        for base in bases:
            if base.number in labelled:
                base.published_over_base(self.version)

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
        fenced = self._base is not None and self._base.report is not None
        receivers = FENCED if fenced else self._members.plan.receivers_in_failure
        progress = "moving" if fenced and self.progress == "starting" else self.progress
        held = [session.address for session in self.sessions if session.paused]
        return with_consequence(first, self.sync, self.version, progress, receivers, held)

    def _end(self, cause: str, error: BaseException) -> None:
        if self._is_controller:
            self._verdicts.refuse(error)
        self._members.mover.abort(cause, sync=self.sync)
        cancel_all(self.sessions, self.sync, self.version, cause, _CANCEL_SECONDS)
        if self._base is not None and self._base.report is not None:
            # Its own part is verified and stays unpublished: whoever waits at the engine is to hear of it.
            self._base._end(cause, error)

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
    def _absent(self) -> frozenset[int]:
        return self._members.absent(self.go)

    @property
    def sessions(self) -> tuple[ReplicaSession, ...]:
        """On the controller: of the replicas that take part; of all, until it is told who does."""
        if self.progress == "starting":
            return self._members.taking_part({item.replica for item in self.go.missing})
        return self._members.taking_part(self._absent)

    def _key(self, step: str) -> str:
        return f"{self._part}/{self.sync}/{step}"
