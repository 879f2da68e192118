"""The lane: one trainer joined to one or more replicas of a rollout engine.

Every trainer rank holds a `Lane` and makes the same calls in the same order. Rank 0 is the controller: it
alone talks to engines. A sync that fails on one process fails on all, with the first cause.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from weightlane.adapters import published_adapter
from weightlane.connecting import connect, rollout, trainer
from weightlane.control import CONTROLLER
from weightlane.errors import SyncError
from weightlane.events import EventSource
from weightlane.lane_sleep import LaneSleep
from weightlane.lane_state import LaneRecord
from weightlane.sync_run import SyncRun
from weightlane.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from weightlane.adapters import AdapterRef
    from weightlane.aio import AsyncLane
    from weightlane.bounds import Bounds
    from weightlane.control import ControlChannel
    from weightlane.endpoint import EngineEndpoint
    from weightlane.lane_messages import SyncReport
    from weightlane.lane_state import LaneState, ReplicaState
    from weightlane.membership import Membership
    from weightlane.messages import Generation
    from weightlane.plan import LanePlan
    from weightlane.registry import Registry
    from weightlane.residency import ReplicaResidency
    from weightlane.sample_version import SampleVersion

_CLOSE_SECONDS = 20.0
log = logging.getLogger("weightlane.lane")

__all__ = ["Lane", "Mode", "connect", "rollout", "trainer"]


class Lane:
    """Made by `connect`; see there. Use it as a context manager, or call `close`.

    One call at a time: a second one that comes from another thread meanwhile is refused, but for `state`,
    `plan`, `residency` and `interrupt`.
    """

    def __init__(
        self,
        members: Membership,
        *,
        channel: ControlChannel,
        bounds: Bounds,
        registry: Registry,
        base: Membership | None = None,
    ) -> None:
        self._members = members
        self._base = base
        self._channel = channel
        self._bounds = bounds
        self._events = EventSource(registry, members.plan.lane, channel.rank)
        self._record = LaneRecord(channel.rank)
        self._record.connected(members.plan)
        self._run: SyncRun | None = None
        self._running: tuple[SyncRun, ...] = ()
        # Bounded by not waiting, or by a timeout: see `_alone` and `close`.
        self._calling = threading.Lock()
        self._closed = False
        self._sleeping = LaneSleep(members, channel, bounds)

    # -- what it is ---------------------------------------------------------------------------------------

    def plan(self) -> LanePlan:
        """What was decided at connect; print it. A replica that came back shows its new incarnation.

        In mode adapter its `base` is the plan by which the base is sent, where the lane can send it.
        """
        return msgspec.structs.replace(self._members.plan, base=self._base.plan if self._base else None)

    @property
    def published_version(self) -> int | None:
        """The version that every replica which took part serves; None before the first commit."""
        return self._record.published.version if self._record.published else None

    def adapter_ref(self) -> AdapterRef:
        """What a request to any replica must name to be answered with the published adapter; on every rank.

        Ask again after each sync: where two slots swap, every version has a name of its own.

        Raises:
            SyncError: the lane's mode is not adapter, or nothing is published yet.
        """
        return published_adapter(self._members.plan, self._record.published)

    @property
    def replicas(self) -> tuple[EngineEndpoint, ...]:
        """On the controller: the open endpoints. Empty on other ranks."""
        return tuple(session.endpoint for session in self._members.sessions)

    @cached_property
    def aio(self) -> AsyncLane:
        """The same calls for an event loop; see `weightlane.aio` for what cancelling one means."""
        from weightlane.aio import AsyncLane

        return AsyncLane(self)

    @property
    def state(self) -> LaneState:
        """Where the lane is, from what this rank knows; asks nobody. Print it."""
        sessions = {session.number: session for session in self._members.sessions}

        def with_session(known: ReplicaState) -> ReplicaState:
            session = sessions.get(known.replica)
            if session is None:
                return known
            return replace(
                known,
                servable=False if session.released or session.weights_lost else known.servable,
                paused=session.paused,
                released=session.released,
                last_error=known.missing or session.last_error,
            )

        return self._record.state(self._members.plan, with_session)

    def version_of(self, sample: Generation | int | None) -> SampleVersion:
        """Which version produced a sample, and how many the lane has published since; on every rank.

        Args:
            sample: what a replica generated, or the version that it was stamped with (None: with none).
        """
        all_stamp = all(replica.stamps_version for replica in self._members.plan.replicas)
        return self._record.versions.of(sample, all_stamp=all_stamp)

    def residency(self, *, seconds: float = 10.0) -> list[ReplicaResidency]:
        """Asks every replica what it holds now, all at once, each for `seconds` at most. Controller only.

        A replica that does not answer is in the list with its error. A worker that is in the middle of a
        sync answers after it.
        """
        self._require_open()
        if self._channel.rank != CONTROLLER:
            raise SyncError(
                f"Rank {self._channel.rank} cannot ask the replicas of lane {self._members.plan.lane}.",
                "Rank 0 alone talks to engines.",
                "Ask on rank 0; lane.state tells on every rank what is known there.",
            )
        return self._members.ask(seconds)

    # -- syncing --------------------------------------------------------------------------------------------

    def sync(self, version: int) -> SyncReport:
        """`stage` then `commit`. Every rank calls it with the same version.

        Raises:
            WeightlaneError: the first cause of failure, the same on every rank that can still be reached.
        """
        with self._alone("sync"):
            report = self._stage(version)
            self._commit()
            return report

    def stage(self, version: int) -> SyncReport:
        """Moves and verifies `version` on every worker of every replica, without publishing it.

        Full weights are written in place, so that no replica holds the old version any more: nothing
        generates until `commit`. In mode adapter with two slots the old adapter answers until then.
        """
        with self._alone("stage"):
            return self._stage(version)

    def commit(self) -> None:
        """Publishes the staged version on every replica and lets generation go on."""
        with self._alone("commit"):
            self._commit()

    def sleep(self) -> None:
        """Has every replica let go of the memory named in `connect(release=...)`, until a sync or `wake`.

        Every rank calls it. Generation is refused meanwhile. With `weights` in it nothing is served until the
        next sync is published, which takes the memory back itself, in the order that the plan's schedule has.
        """
        with self._alone("sleep"):
            self._require_open()
            if self._record.staged is not None:
                raise SyncError(
                    f"Version {self._record.staged.version} is staged on lane {self._members.plan.lane}.",
                    "Sleeping engines could lose it before it is published.",
                    "Call commit() first.",
                )
            self._sleeping.sleep(self.published_version or 0)

    def wake(self) -> None:
        """Takes back, on every replica, the memory that was released and no other. Every rank calls it.

        Where weights were among it they are lost, and the replica stays as it is until a sync is published.
        """
        with self._alone("wake"):
            self._require_open()
            self._sleeping.wake(self.published_version or 0)

    def interrupt(self, why: str) -> bool:
        """Has the sync that runs now in another thread fail on all ranks with SyncCancelledError.

        Returns:
            False where nothing runs, or the version is staged already: that is decided, and not torn.
        """
        running = self._running if self._calling.locked() else ()
        interrupted = [run.interrupt(why) for run in running]  # each of them, not only the first that can be
        return any(interrupted)

    def close(self) -> None:
        """Lets go of rings, plans and handles. The engines live on. Idempotent.

        A sync that runs in another thread is interrupted first, and waited for, 20 s at most.
        """
        if self._closed:
            return
        self.interrupt("The lane is being closed.")
        alone = self._calling.acquire(timeout=_CLOSE_SECONDS)
        try:
            self._closed = True
            self._record.phase = "closed"
            for members in (self._members, self._base):
                if members is not None:
                    members.close()
            self._channel.close()
            self._events.tell("closed", self.published_version or 0)
        finally:
            if alone:
                self._calling.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------

    def _stage(self, version: int) -> SyncReport:
        self._require_open()
        self._record.syncs += 1
        self._record.staged = None
        sync = self._events.sync = self._record.syncs
        common = (self._channel, self._bounds, self._events)
        base = None
        if self._base is not None:
            base = SyncRun(self._base, *common, sync=sync, version=version, part="base")
        run = self._run = SyncRun(self._members, *common, sync=sync, version=version, base=base)
        self._running = (base, run) if base else (run,)
        self._events.tell("sync-started", version)
        if base is not None:
            self._stage_base(base)
        try:
            report = run.stage(self._record.published)
        except BaseException as error:
            raise self._failed(run, error) from error
        if report is None:
            raise AssertionError("only a base may be there already")
        self._record.started(run.go)
        self._record.has_staged(report)
        return report

    def _stage_base(self, run: SyncRun) -> None:
        """Brings the base to whoever does not hold it; it is served with the adapter, not before."""
        try:
            report = run.stage(None)
        except BaseException as error:
            raise self._failed(run, error) from error
        self._record.started(run.go)
        if report is not None:
            self._record.base_written(report.phases[-1].replicas)
            self._events.tell("base-sent", run.version, nbytes=report.nbytes, detail=str(report.phases[-1]))
            if self._channel.rank == CONTROLLER:
                log.warning("lane %s, sync %d: %s", self._members.plan.lane, run.sync, report.phases[-1])

    def _commit(self) -> None:
        self._require_open()
        run, report = self._run, self._record.staged
        if run is None or report is None:
            raise SyncError(
                f"Lane {self._members.plan.lane} has nothing staged.",
                "commit() publishes what the last stage() moved, once.",
                "Call stage(version) first, or sync(version).",
            )
        try:
            run.commit()
        except BaseException as error:
            raise self._failed(run, error) from error
        self._record.has_published(report)
        self._events.tell("published", report.version, nbytes=report.nbytes, seconds=report.seconds)

    def _failed(self, run: SyncRun, error: BaseException) -> BaseException:
        """The error to raise; whatever happens meanwhile, the record says that the sync failed."""
        told = error
        try:
            told = run.failed(error)
        finally:
            if run.progress != "starting":  # else nobody said who takes part
                self._record.started(run.go)
                self._record.base_written([item.replica for item in run.go.needs_base])
            self._record.has_failed(told, run.progress, run.version, run.published)
        return told

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        if not self._calling.acquire(blocking=False):
            raise SyncError(
                f"{call} of lane {self._members.plan.lane} was called while another call of it runs.",
                "Syncs of a lane come one after the other, in the same order on every rank.",
                "Wait for the other thread's call, or use lane.aio, which does.",
            )
        try:
            yield
        finally:
            self._calling.release()

    def _require_open(self) -> None:
        if self._closed:
            raise SyncError(
                f"Lane {self._members.plan.lane} is closed.",
                "close() was called on this rank.",
                "Connect again.",
            )
