"""The controller's side of one replica through a sync: pause, receive, settle, publish, resume, cancel."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from weightlane.agent_calls import call_agents
from weightlane.errors import SyncTimeoutError, WeightlaneError
from weightlane.messages import (
    AgentRequest,
    Attach,
    Cancel,
    CheckResidency,
    Detach,
    Done,
    FinishInline,
    Publish,
    Receive,
    ReceiveDisk,
    ReceiveReport,
)
from weightlane.types import TransportName
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightlane.bounds import Bounds
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan
    from weightlane.program import EngineCall
    from weightlane.transports.disk import WrittenVersion

_CLEANUP_SECONDS = 5.0
_T = TypeVar("_T")


class ReplicaSession:
    """One replica; made at connect, used at every sync, from the controller's main thread.

    Args:
        plan: the lane's plan.
        number: which of its replicas this is.
        endpoint: the open handle.
        bounds: the lane's bounds.
    """

    def __init__(self, plan: LanePlan, number: int, endpoint: EngineEndpoint, bounds: Bounds) -> None:
        self._plan = plan
        self._replica = plan.replicas[number]
        self.endpoint = endpoint
        self._bounds = bounds
        self._receiving: _ReceiveCall | None = None
        self._on_failure: Callable[[BaseException], None] = _ignore
        self._reports_within = bounds.finish
        self._paused = False
        self._dirty = False

    @property
    def address(self) -> str:
        """Where the replica is."""
        return self._replica.address

    @property
    def has_agent(self) -> bool:
        """Whether counts and digests come back."""
        return self._replica.has_agent

    def attach(self, ring: dict[int, str], folder: str = "") -> None:
        """Gives every worker the plan; each checks it against what it holds and refuses before any write."""
        if self.has_agent:
            request = Attach(self._plan.receive_plan(self._replica.replica, ring, folder))
            self._call(request, Done, self._bounds.connect)

    def begin(self, sync: int, version: int, on_failure: Callable[[BaseException], None]) -> None:
        """Pauses the engine as planned and, over a ring, starts the long receive call in a thread."""
        self._receiving = None
        self._on_failure = on_failure
        if self._replica.program.pause and not self._paused:
            # Before the calls: one that fails half-way must be resumed as well.
            self._paused = True
            self._run(self._replica.program.pause, version)
        if self._replica.transport is TransportName.SHM:
            request = Receive(
                lane=self._plan.lane,
                plan_digest=self._plan.digest(),
                sync=sync,
                version=version,
                incarnation=self._replica.incarnations,
                wait_seconds=self._bounds.bucket,
                lost_after_seconds=self._bounds.lost_after,
                generation=self._replica.generation,
            )
            # The call lasts a whole sync; liveness of both sides ends it long before this bound does.
            seconds = self._bounds.whole_sync(len(self._plan.buckets), 1)
            self._receiving = _ReceiveCall(lambda: self._call(request, ReceiveReport, seconds), on_failure)
        if self._replica.transport is TransportName.DISK:
            # Else a worker made anew would be found out only after the whole version was written.
            residency = CheckResidency(self._plan.lane, self._plan.digest(), self._replica.incarnations)
            self._call(residency, Done, self._bounds.bucket)

    def load_from_disk(self, written: WrittenVersion) -> None:
        """Over a folder: starts every worker's loading of it, in a thread."""
        request = ReceiveDisk(
            lane=self._plan.lane,
            plan_digest=self._plan.digest(),
            sync=written.sync,
            version=written.version,
            incarnation=self._replica.incarnations,
            folder=written.folder,
            manifest_digest=written.manifest_digest,
            generation=self._replica.generation,
        )
        seconds = self._bounds.bucket * len(self._plan.buckets) + self._bounds.finish
        self._reports_within = seconds
        self._receiving = _ReceiveCall(lambda: self._call(request, ReceiveReport, seconds), self._on_failure)

    def reports(self, sync: int, check: Callable[[], None]) -> list[ReceiveReport]:
        """Every worker's report; empty where no agent runs."""
        if not self.has_agent:
            return []
        if self._receiving is None:
            return self._call(FinishInline(self._plan.lane, sync), ReceiveReport, self._bounds.finish)
        return self._receiving.result(self._reports_within, check, self.address)

    def settle(self, version: int) -> None:
        """Runs the engine calls that belong after the last bucket."""
        self._run(self._replica.program.settle, version)

    def publish(self, sync: int, version: int) -> None:
        """Makes the version the one that is served."""
        if self.has_agent:
            self._call(Publish(self._plan.lane, sync, version), Done, self._bounds.finish)
        self._run(self._replica.program.publish, version)
        self._dirty = False

    def resume(self, version: int) -> None:
        """Lets generation go on, if it was this session that paused it."""
        if self._paused:
            self._run(self._replica.program.resume, version)
            self._paused = False

    def touched(self) -> None:
        """Buckets may reach this replica from now on: only a published version lets it generate again."""
        self._dirty = True

    def cancel(self, sync: int, version: int, cause: str) -> None:
        """Ends this replica's part of a failed sync: waits for its receive call, then tells the workers why.

        Best effort and bounded: the sync has failed already and its cause must not be hidden by this. An
        engine that was paused and that no sync has touched since it last published generates again.
        """
        self._resume_if_clean(version)
        if self._receiving is not None and not self._receiving.ended(
            self._bounds.lost_after + _CLEANUP_SECONDS
        ):
            return
        if self.has_agent:
            with contextlib.suppress(WeightlaneError):
                self._call(Cancel(self._plan.lane, sync, cause), Done, _CLEANUP_SECONDS)

    def _resume_if_clean(self, version: int) -> None:
        if self._paused and not self._dirty:
            with contextlib.suppress(WeightlaneError):
                self.resume(version)

    def close(self) -> None:
        """Detaches from the workers and lets go of the endpoint."""
        self._resume_if_clean(0)
        if self.has_agent:
            # A dead engine needs no detaching.
            with contextlib.suppress(WeightlaneError):
                self._call(Detach(self._plan.lane), Done, _CLEANUP_SECONDS)
        self.endpoint.close()

    def _run(self, calls: Sequence[EngineCall], version: int) -> None:
        for call in calls:
            self.endpoint.call(call, version=version)

    def _call(self, request: AgentRequest, kind: type[_T], seconds: float) -> list[_T]:
        return call_agents(self.endpoint, request, kind, workers=len(self._replica.peers), seconds=seconds)


def _ignore(error: BaseException) -> None:
    """Before the first sync nobody waits for a failure."""


def cancel_all(
    sessions: Sequence[ReplicaSession], sync: int, version: int, cause: str, seconds: float
) -> None:
    """Cancels a failed sync on every replica at once, for at most `seconds` in all."""
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(target=session.cancel, args=(sync, version, cause), daemon=True)
        for session in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class _ReceiveCall:
    """The long call, in a thread, beside the gather on the ranks."""

    def __init__(
        self, call: Callable[[], list[ReceiveReport]], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._reports: list[ReceiveReport] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

        def run() -> None:
            try:
                self._reports = call()
            except BaseException as error:  # noqa: BLE001 - it belongs to the main thread
                self._error = error
                on_failure(error)
            finally:
                self._done.set()

        threading.Thread(target=run, name="weightlane-receive", daemon=True).start()

    def ended(self, seconds: float) -> bool:
        """Whether the call ends within `seconds`."""
        return self._done.wait(seconds)

    def result(self, seconds: float, check: Callable[[], None], address: str) -> list[ReceiveReport]:
        """The reports, or the call's own error."""
        if not wait_until(self._done.is_set, seconds=seconds, check=check):
            raise SyncTimeoutError(
                f"{address} has not reported within {seconds:g} s of the last bucket.",
                "Its loader or post-processing still runs, or hangs.",
                "Raise Bounds.finish if it is that slow.",
            )
        if self._error is not None:
            raise self._error
        return self._reports
