"""The controller's side of one replica through a sync: pause, receive, settle, publish, resume, cancel."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from weightlane.adapter_requests import adapter_by_request
from weightlane.agent_calls import call_agents
from weightlane.errors import SyncError, SyncTimeoutError, WeightlaneError
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
from weightlane.receive_call import ReceiveCall
from weightlane.remembered_base import RememberedBase, publishes_version
from weightlane.request_read_back import read_back_by_request
from weightlane.residency import ReplicaResidency
from weightlane.schedule import calls_of
from weightlane.types import Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightlane.adapters import AdapterBinding
    from weightlane.bounds import Bounds
    from weightlane.endpoint import EngineEndpoint
    from weightlane.lane_messages import RingPlace
    from weightlane.messages import ReadBack
    from weightlane.plan import LanePlan
    from weightlane.program import EngineCall, MemoryCalls
    from weightlane.schedule import StepKind
    from weightlane.trace.table import PlacementTable
    from weightlane.transports.disk import WrittenVersion
    from weightlane.types import MemoryTag

_CLEANUP_SECONDS = 5.0
log = logging.getLogger("weightlane.lane")
_T = TypeVar("_T")


class ReplicaSession:
    """One replica; made at connect, used at every sync, from the controller's main thread.

    Args:
        plan: the lane's plan.
        number: which of its replicas this is.
        endpoint: the open handle.
        bounds: the lane's bounds.
        tables: of its workers, where it is read back by a request of the endpoint's own.
    """

    def __init__(
        self,
        plan: LanePlan,
        number: int,
        endpoint: EngineEndpoint,
        bounds: Bounds,
        *,
        tables: Sequence[PlacementTable] = (),
    ) -> None:
        self._plan = plan
        self._replica = plan.replicas[number]
        self.number = number
        self.last_error = ""
        self.endpoint = endpoint
        self._bounds = bounds
        self.read_back = (
            None if self._replica.has_agent else read_back_by_request(endpoint, tables, plan.read_back)
        )
        self.adapter = adapter_by_request(plan, number, endpoint)
        self.over_base_sent = False
        """Whether the base under this adapter is written in this sync: then its session holds the fence."""
        self._base = RememberedBase(self._replica.program)
        self._versions_at_start: tuple[int | None, ...] = ()
        self._receiving: ReceiveCall | None = None
        self._on_failure: Callable[[BaseException], None] = _ignore
        self._reports_within = bounds.finish
        self._paused = False
        self._resume_in_doubt = False
        self._ending: threading.Thread | None = None
        # What takes requests only cannot tell whether a trainer before this one left it half-written.
        self._dirty = not self._replica.has_agent
        self._released: set[MemoryTag] = set()
        self._whole_if_unwritten = False
        self.weights_lost = False

    @property
    def address(self) -> str:
        """Where the replica is."""
        return self._replica.address

    @property
    def paused(self) -> bool:
        """Whether this session holds generation back at the engine."""
        return self._paused

    @property
    def has_agent(self) -> bool:
        """Whether counts and digests come back."""
        return self._replica.has_agent

    def residency(self, seconds: float) -> ReplicaResidency:
        """What its workers hold now, in their own words."""
        with self._noting_errors():
            workers = tuple(self.endpoint.residency(self._replica.backend, self._plan.lane, seconds))
        if self._plan.phase is Phase.BASE and not self.has_agent:
            workers = tuple(self._base.as_told(worker) for worker in workers)
        return ReplicaResidency(self.number, self.address, workers)

    @property
    def manages_memory(self) -> bool:
        """Whether the lane was connected to let this engine's memory go and take it back."""
        return bool(self._replica.program.memory)

    @property
    def released(self) -> tuple[MemoryTag, ...]:
        """Memory that this session has let go and not taken back."""
        return tuple(item.tag for item in self._replica.program.memory if item.tag in self._released)

    def adopt(self, residency: ReplicaResidency) -> None:
        """Takes the engine's word for what is released: whoever let it go, the lane takes it back.

        An engine that says that its weights are no whole version is not let generate before one is published.

        Raises:
            SyncError: something is released that the lane was not asked to manage.
        """
        self._versions_at_start = residency.versions
        if not self.has_agent:
            return
        told = {tag for worker in residency.workers for tag in worker.released}
        managed: dict[str, MemoryTag] = {item.tag: item.tag for item in self._replica.program.memory}
        foreign = sorted(told - managed.keys())
        if foreign:
            raise SyncError(
                f"{self.address} sleeps: it has released {', '.join(foreign)}.",
                f"The lane was connected to manage {', '.join(managed) or 'no memory'}, and never resumes "
                "what it was not asked to.",
                "Wake the engine before the sync, or name that memory in connect(release=...).",
            )
        self._released = {managed[tag] for tag in told}
        lost = "weights" in told & {
            item.tag for item in self._replica.program.memory if item.contents == "lost"
        }
        if lost or any(worker.cause for worker in residency.workers):  # one that only sleeps is whole
            self._dirty = True
            self.weights_lost |= "weights" in told

    def sleep(self, version: int) -> None:
        """Holds generation back and lets go of all memory that the lane manages and still has."""
        self.take_step("pause", version)
        for item in self._replica.program.memory:
            self._release(item, version)

    def wake(self, version: int) -> None:
        """Takes back what was released; generation goes on where the weights are still whole."""
        self.take_step("resume-weights", version)
        self.take_step("resume-memory", version)
        self._resume_if_clean(version)

    def take_step(self, kind: StepKind, version: int) -> None:
        """One kind of step of the schedule before or after the move, as far as this replica has it."""
        memory = self._replica.program.memory
        if kind == "pause":
            if self._replica.program.pause and (not self._paused or self._resume_in_doubt):
                # Before the calls: one that fails half-way must be resumed as well.
                self._paused = True
                self._run(self._replica.program.pause, version)
                self._resume_in_doubt = False
        elif kind == "release":
            for item in memory:
                if item.tag != "weights":  # released for a sync, they would be taken back at once
                    self._release(item, version)
        elif kind in ("resume-weights", "resume-memory"):
            for item in reversed(memory):
                if (item.tag == "weights") == (kind == "resume-weights"):
                    self._take_back(item, version)
        else:
            self._run(calls_of(self._replica.program, kind), version)

    def attach(self, rings: Sequence[RingPlace], folder: str = "") -> None:
        """Gives every worker the plan; each checks it against what it holds and refuses before any write.

        Of `rings`, this replica takes its own.
        """
        if self.has_agent:
            mine = [place for place in rings if place.replica == self.number]
            request = Attach(self._plan.receive_plan(self._replica.replica, mine, folder))
            self._call(request, Done, self._bounds.connect)

    def begin(self, sync: int, version: int, on_failure: Callable[[BaseException], None]) -> None:
        """Over a ring, starts the long receive call in a thread; the steps before the move are taken."""
        self._receiving = None
        self._on_failure = on_failure
        if self._replica.transport.has_ring:
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
            self._receiving = ReceiveCall(lambda: self._call(request, ReceiveReport, seconds), on_failure)
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
        self._receiving = ReceiveCall(lambda: self._call(request, ReceiveReport, seconds), self._on_failure)

    def reports(self, sync: int, check: Callable[[], None]) -> list[ReceiveReport]:
        """Every worker's report; empty where no agent runs."""
        if not self.has_agent:
            return []
        if self._receiving is None:
            return self._call(FinishInline(self._plan.lane, sync), ReceiveReport, self._bounds.finish)
        return self._receiving.result(self._reports_within, check, self.address)

    def load_adapter(self, version: int) -> AdapterBinding | None:
        """Sends the adapter that was gathered, in the engine's one request; None where an agent does.

        Raises:
            VerificationError: the engine bound it otherwise than it was sent.
            EngineError: it refused it; what it served before is untouched under policy `two_slot`.
        """
        if self.adapter is None:
            return None
        with self._noting_errors():
            return self.adapter.load(version, held=self._paused or self.over_base_sent)

    def read_back_equal(self) -> tuple[ReadBack, ...]:
        """What its workers hold, compared with what was sent, where an endpoint asks and this sync is due.

        Raises:
            VerificationError: elements are not where they were written.
        """
        if self.read_back is None or not self.read_back.due:
            return ()
        with self._noting_errors():
            return self.read_back.require_equal(self._bounds.finish)

    def publish(self, sync: int, version: int) -> None:
        """Makes the version the one that is served."""
        self._whole_if_unwritten = False
        if self.adapter is not None:
            with self._noting_errors():
                self.adapter.publish()
        if self.has_agent:
            self._call(Publish(self._plan.lane, sync, version), Done, self._bounds.finish)
        self._run(self._replica.program.publish, version)
        if self._plan.phase is Phase.BASE and self._plan.trained_on is not None:
            self._base.sent(self._plan.trained_on.identity, version)
        self._dirty = self.weights_lost = False
        self.last_error = ""

    def published_over_base(self, version: int) -> None:
        """In phase BASE: the adapter over it was published, and the replica may tell that version now."""
        self._base.relabelled(version)

    @property
    def labels(self) -> bool:
        """Whether publishing sets the version that the engine tells."""
        return publishes_version(self._replica.program)

    def was_written_by_others(self, residency: ReplicaResidency) -> bool:
        """Whether somebody else published a version since the sync began; an agent would know by itself."""
        return not self.has_agent and residency.versions != self._versions_at_start

    def resume(self, version: int) -> None:
        """Lets generation go on, if it was this session that paused it."""
        if self._paused:
            self._resume_in_doubt = True  # a call that fails may have been obeyed nevertheless
            self._run(self._replica.program.resume, version)
            self._paused = self._resume_in_doubt = False

    def touched(self) -> None:
        """Buckets may reach this replica from now on, or it missed a version: publishing resumes it.

        Else that does its agents' word, once the sync has failed: that nothing was written.
        """
        self._whole_if_unwritten = self._paused and not self._dirty
        self._dirty = True
        self._base.forget()

    def start_to_cancel(self, sync: int, version: int, cause: str) -> threading.Thread:
        """`cancel` in a thread of its own, which `require_ended` looks for."""
        self._ending = threading.Thread(target=self.cancel, args=(sync, version, cause), daemon=True)
        self._ending.start()
        return self._ending

    def require_ended(self, seconds: float) -> None:
        """Waits for the end of the last failed sync, which could else resume the engine during the next.

        Raises:
            SyncTimeoutError: it had not ended within `seconds`.
        """
        if self._ending is None:
            return
        self._ending.join(seconds)
        if self._ending.is_alive():
            raise SyncTimeoutError(
                f"{self.address} is still ending the last sync, which failed.",
                f"A call to it has not returned for {seconds:g} s more.",
                "Look at the engine's log, and sync again.",
            )
        self._ending = None

    def cancel(self, sync: int, version: int, cause: str) -> None:
        """Ends this replica's part of a failed sync: waits for its receive call, then tells the workers why.

        Best effort and bounded: the sync has failed already and its cause must not be hidden by this. An
        engine that was paused and that no sync has touched since it last published generates again.
        """
        self._resume_if_clean(version)
        if self.adapter is not None:
            with contextlib.suppress(WeightlaneError):
                self.adapter.discard()
                if self.adapter.serves_as_before and not self.over_base_sent:
                    self.resume(version)
        if self._receiving is not None and not self._receiving.ended(
            self._bounds.lost_after + _CLEANUP_SECONDS
        ):
            return
        if self.has_agent:
            with contextlib.suppress(WeightlaneError):
                self._call(Cancel(self._plan.lane, sync, cause), Done, _CLEANUP_SECONDS)
                self._resume_if_unwritten(version)

    def _resume_if_unwritten(self, version: int) -> None:
        """A publication that was begun is no such case: caches may be stale though all weights are whole."""
        if self._whole_if_unwritten:
            workers = self.residency(_CLEANUP_SECONDS).workers
            self._dirty = not (workers and all(worker.servable for worker in workers))
            self._resume_if_clean(version)

    def _resume_if_clean(self, version: int) -> None:
        if self._dirty:
            return
        with contextlib.suppress(WeightlaneError):
            self.take_step("resume-memory", version)
            self.resume(version)

    def close(self) -> None:
        """Detaches from the workers and lets go of the endpoint; warns of what stays held back."""
        self._resume_if_clean(0)
        if self._paused or self._released:
            log.warning(
                "lane %s is closed and leaves %s %s, until another lane publishes a version to it",
                self._plan.lane,
                self.address,
                " and ".join(
                    (
                        *(("with generation held back",) if self._paused else ()),
                        *((f"without its {' and '.join(self.released)}",) if self._released else ()),
                    )
                ),
            )
        if self.adapter is not None:
            with contextlib.suppress(WeightlaneError):
                self.adapter.discard()
        if self.has_agent:
            # A dead engine needs no detaching.
            with contextlib.suppress(WeightlaneError):
                self._call(Detach(self._plan.lane), Done, _CLEANUP_SECONDS)
        self.endpoint.close()

    def _release(self, item: MemoryCalls, version: int) -> None:
        if item.tag in self._released:
            return
        # Before the call: what may be released is taken back, and weights that may be lost are not served.
        self._released.add(item.tag)
        if item.tag == "weights" and item.contents == "lost":
            self._dirty = self.weights_lost = True
        self._run((item.release,), version)

    def _take_back(self, item: MemoryCalls, version: int) -> None:
        if item.tag in self._released:
            self._run((item.resume,), version)
            self._released.discard(item.tag)

    def _run(self, calls: Sequence[EngineCall], version: int) -> None:
        with self._noting_errors():
            for call in calls:
                self.endpoint.call(call, version=version)

    def _call(self, request: AgentRequest, kind: type[_T], seconds: float) -> list[_T]:
        with self._noting_errors():
            return call_agents(
                self.endpoint, request, kind, workers=len(self._replica.peers), seconds=seconds
            )

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            raise


def take_steps(kinds: Sequence[StepKind], sessions: Sequence[ReplicaSession], version: int) -> None:
    """Each kind of step on every replica before the next kind on any, as the schedule has it."""
    for kind in kinds:
        for session in sessions:
            session.take_step(kind, version)


def _ignore(error: BaseException) -> None:
    """Before the first sync nobody waits for a failure."""


def cancel_all(
    sessions: Sequence[ReplicaSession], sync: int, version: int, cause: str, seconds: float
) -> None:
    """Cancels a failed sync on every replica at once, for at most `seconds` in all."""
    deadline = time.monotonic() + seconds
    threads = [session.start_to_cancel(sync, version, cause) for session in sessions]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
