"""The lane: one trainer joined to one or more replicas of a rollout engine.

Every trainer rank holds a `Lane` and makes the same calls in the same order. Rank 0 is the controller: it
alone talks to engines. A sync that fails on one process fails on all, with the first cause.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from weightlane.adapters import published_adapter
from weightlane.agreement import put_outcome
from weightlane.connecting import connect, rollout, trainer
from weightlane.control import CONTROLLER
from weightlane.errors import SyncError, WeightlaneError
from weightlane.events import EventKind, SyncEvent
from weightlane.lane_messages import Committed, Go, RankMoved, SyncReport, SyncStart
from weightlane.moving import move_buckets
from weightlane.replica_session import cancel_all
from weightlane.sync_failure import SyncProgress, diagnosed, first_cause, partly_published, with_consequence
from weightlane.transports.sink import SinkBounds
from weightlane.types import Mode
from weightlane.verify import verify_ranks, verify_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from weightlane.adapters import AdapterRef
    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.endpoint import EngineEndpoint
    from weightlane.moving import Mover
    from weightlane.plan import LanePlan
    from weightlane.registry import Registry
    from weightlane.replica_session import ReplicaSession
    from weightlane.stream import ExportStream

_CANCEL_SECONDS = 15.0
_T = TypeVar("_T")

__all__ = ["Lane", "Mode", "connect", "rollout", "trainer"]


class Lane:
    """Made by `connect`; see there. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        plan: LanePlan,
        *,
        rank: int,
        channel: ControlChannel,
        mover: Mover,
        sessions: Sequence[ReplicaSession],
        bounds: Bounds,
        registry: Registry,
    ) -> None:
        self._plan = plan
        self._plan_digest = plan.digest()
        self._rank = rank
        self._channel = channel
        self._mover = mover
        self._sessions = tuple(sessions)
        self._bounds = bounds
        self._registry = registry
        self._patience = bounds.whole_sync(plan.bucket_waits, len(plan.replicas))
        self._sync = 0
        self._broken_by = 0
        self._staged: SyncReport | None = None
        self._published: SyncReport | None = None
        self._closed = False

    # -- what it is ---------------------------------------------------------------------------------------

    def plan(self) -> LanePlan:
        """What was decided at connect; print it."""
        return self._plan

    @property
    def published_version(self) -> int | None:
        """The version that every replica serves; None before the first commit."""
        return self._published.version if self._published else None

    def adapter_ref(self) -> AdapterRef:
        """What a request to any replica must name to be answered with the published adapter; on every rank.

        Ask again after each sync: where two slots swap, every version has a name of its own.

        Raises:
            SyncError: the lane's mode is not adapter, or nothing is published yet.
        """
        return published_adapter(self._plan, self._published)

    @property
    def replicas(self) -> tuple[EngineEndpoint, ...]:
        """On the controller: the open endpoints. Empty on other ranks."""
        return tuple(session.endpoint for session in self._sessions)

    # -- syncing --------------------------------------------------------------------------------------------

    def sync(self, version: int) -> SyncReport:
        """`stage` then `commit`. Every rank calls it with the same version.

        Raises:
            WeightlaneError: the first cause of failure, the same on every rank that can still be reached.
        """
        report = self.stage(version)
        self.commit()
        return report

    def stage(self, version: int) -> SyncReport:
        """Moves and verifies `version` on every worker of every replica, without publishing it."""
        self._require_open()
        self._sync += 1
        sync = self._sync
        self._staged = None
        self._emit("sync-started", version)
        progress: SyncProgress = "starting"
        started = time.monotonic()
        try:
            with ExitStack() as export:
                stream = self._agree_to_start(sync, version, export)
                progress = "moving"
                moved = self._move(stream, sync, version)
            self._channel.put(f"sync/{sync}/moved/{self._rank}", moved)
            if self._is_controller:
                self._channel.put(f"sync/{sync}/staged", self._verify(sync, version, started))
            report = self._await(f"sync/{sync}/staged", SyncReport, sync)
        except BaseException as error:
            raise self._failed(sync, version, error, progress) from error
        self._staged = report
        return report

    def commit(self) -> None:
        """Publishes the staged version on every replica and lets generation go on."""
        self._require_open()
        report = self._staged
        if report is None:
            raise SyncError(
                f"Lane {self._plan.lane} has nothing staged.",
                "commit() publishes what the last stage() moved, once.",
                "Call stage(version) first, or sync(version).",
            )
        self._staged = None
        sync, version = report.sync, report.version
        try:
            if self._is_controller:
                self._publish(sync, version)
                self._channel.put(f"sync/{sync}/committed", Committed(version))
            self._await(f"sync/{sync}/committed", Committed, sync)
        except BaseException as error:
            raise self._failed(sync, version, error, "committing") from error
        self._published = report
        self._mover.published(sync)
        self._emit("published", version, nbytes=report.nbytes, seconds=report.seconds)

    def close(self) -> None:
        """Lets go of rings, plans and handles. The engines live on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for session in self._sessions:
            session.close()
        self._mover.close()
        self._channel.close()
        self._emit("closed", self.published_version or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the steps of a sync --------------------------------------------------------------------------------

    @property
    def _is_controller(self) -> bool:
        return self._rank == CONTROLLER

    def _agree_to_start(self, sync: int, version: int, export: ExitStack) -> ExportStream:
        """All ranks with the same version and plan, all exports and engines ready, before any collective.

        One verdict, the controller's, says whether the sync begins: nobody acts on anything else until then.
        """
        opened: list[ExportStream] = []

        def ready() -> SyncStart:
            if self._broken_by:
                raise SyncError(
                    f"The collective group of lane {self._plan.lane} was broken in sync {self._broken_by}.",
                    "A rank left that sync's collectives before their end.",
                    "Close the lane and connect again.",
                )
            opened.append(export.enter_context(self._mover.open_stream()))
            return SyncStart(version, self._plan_digest)

        put_outcome(self._channel, f"sync/{sync}/start/{self._rank}", ready)
        if self._is_controller:
            put_outcome(self._channel, f"sync/{sync}/go", lambda: self._start_replicas(sync))
        self._channel.get(f"sync/{sync}/go", Go, seconds=self._patience, awaited=(CONTROLLER,))
        return opened[0]

    def _start_replicas(self, sync: int) -> Go:
        self._forget(sync - 2)
        name = _abort_name(sync)
        starts = self._channel.gather(f"sync/{sync}/start", SyncStart, seconds=self._bounds.start, abort=name)
        asked = {rank: start.version for rank, start in enumerate(starts)}
        if len(set(asked.values())) > 1 or len({start.plan_digest for start in starts}) > 1:
            told = ", ".join(f"rank {rank} version {value}" for rank, value in asked.items())
            raise SyncError(
                f"The ranks do not agree on sync {sync}: {told}.",
                "Every rank must call sync with the same version in the same order.",
                "Check the loop that calls sync.",
            )
        for session in self._sessions:
            session.begin(sync, starts[0].version, lambda error: self._channel.abort(name, error))
        self._channel.check_abort(name)
        for session in self._sessions:
            session.touched()
        return Go()

    def _move(self, stream: ExportStream, sync: int, version: int) -> RankMoved:
        bounds = SinkBounds(
            bucket_seconds=self._bounds.bucket,
            lost_after=self._bounds.lost_after,
            check=self._checker(sync),
        )
        started = time.monotonic()
        self._broken_by = sync if stream.collective else 0
        outcome = move_buckets(
            self._mover,
            stream,
            self._plan,
            sync,
            version,
            bounds,
            lambda nbytes: self._emit("bucket-moved", version, nbytes=nbytes),
        )
        self._broken_by = 0
        if outcome.failure is not None:
            raise outcome.failure
        fed = len(self._mover.sinks)
        return RankMoved(
            rank=self._rank,
            tensors=len(self._plan.tensors) * fed,
            nbytes=self._plan.nbytes * fed,
            digest=outcome.digest,
            seconds=time.monotonic() - started,
        )

    def _verify(self, sync: int, version: int, started: float) -> SyncReport:
        moved = self._channel.gather(
            f"sync/{sync}/moved", RankMoved, seconds=self._patience, abort=_abort_name(sync)
        )
        digest = verify_ranks(self._plan, moved)
        reports = []
        for session, replica in zip(self._sessions, self._plan.replicas, strict=True):
            workers = session.reports(sync, self._checker(sync))
            reports.append(verify_replica(self._plan, replica, moved, workers, sync=sync, version=version))
            session.settle(version)
            self._emit("replica-reported", version, detail=f"{replica.address}: {reports[-1].verified}")
        before = self._published
        return SyncReport(
            lane=self._plan.lane,
            sync=sync,
            version=version,
            tensors=len(self._plan.tensors),
            nbytes=self._plan.nbytes,
            buckets=len(self._plan.buckets),
            seconds=time.monotonic() - started,
            digest=digest,
            unchanged_since=before.version if before and digest and before.digest == digest else None,
            replicas=tuple(reports),
        )

    def _publish(self, sync: int, version: int) -> None:
        published: list[str] = []
        try:
            for session in self._sessions:
                session.publish(sync, version)
                published.append(session.address)
            for session in self._sessions:
                session.resume(version)
        except WeightlaneError as error:
            raise partly_published(error, version, published) from error

    # -- failing together -------------------------------------------------------------------------------

    def _failed(self, sync: int, version: int, error: BaseException, progress: SyncProgress) -> BaseException:
        """Tells everyone, ends this rank's part, and gives the error to raise: the first cause of all."""
        if not isinstance(error, Exception):
            self._channel.abort(_abort_name(sync), error)
            self._mover.abort(f"rank {self._rank} was interrupted", sync=sync)
            cancel_all(self._sessions, sync, version, f"rank {self._rank} was interrupted", _CANCEL_SECONDS)
            return error
        patience = self._bounds.lost_after + 2.0 if self._plan.manifest.collective else 0.0
        cause = diagnosed(error, sync, self._rank, patience, self._checker(sync))
        self._channel.abort(_abort_name(sync), cause)
        first = first_cause(self._channel, _abort_name(sync), cause)
        self._mover.abort(str(first), sync=sync)
        cancel_all(self._sessions, sync, version, str(first), _CANCEL_SECONDS)
        self._emit("sync-failed", version, detail=str(first))
        return with_consequence(first, sync, version, progress, self._plan.receivers_in_failure)

    def _checker(self, sync: int) -> Callable[[], None]:
        awaited = range(self._plan.world_size) if self._is_controller else (CONTROLLER,)

        def check() -> None:
            self._channel.check_abort(_abort_name(sync))
            self._channel.check_alive(awaited)

        return check

    # -- small things -------------------------------------------------------------------------------------

    def _await(self, key: str, kind: type[_T], sync: int) -> _T:
        """Waits for the controller's word, which may take as long as all that the controller waits for."""
        return self._channel.get(
            key, kind, seconds=self._patience, awaited=(CONTROLLER,), abort=_abort_name(sync)
        )

    def _forget(self, sync: int) -> None:
        if sync > 0:
            ranks = range(self._plan.world_size)
            self._channel.forget(
                *(f"sync/{sync}/{step}" for step in ("go", "staged", "committed")),
                *(f"sync/{sync}/{step}/{rank}" for step in ("start", "moved") for rank in ranks),
                f"abort/{_abort_name(sync)}",
                f"abort/{_abort_name(sync)}/first",
            )

    def _require_open(self) -> None:
        if self._closed:
            raise SyncError(
                f"Lane {self._plan.lane} is closed.", "close() was called on this rank.", "Connect again."
            )

    def _emit(
        self, kind: EventKind, version: int, *, nbytes: int = 0, seconds: float = 0.0, detail: str = ""
    ) -> None:
        self._registry.emit(
            SyncEvent(kind, self._plan.lane, self._rank, self._sync, version, nbytes, seconds, detail)
        )


def _abort_name(sync: int) -> str:
    return f"sync-{sync}"
