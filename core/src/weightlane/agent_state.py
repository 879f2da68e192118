"""What an agent remembers: the lanes attached to its worker, and the sync that is open on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlane.errors import ProtocolError
from weightlane.lane_owner import is_gone
from weightlane.messages import ReceiveReport

if TYPE_CHECKING:
    from weightlane.adapter_collector import AdapterCollector
    from weightlane.adapters import AdapterBinding, TrainedBase
    from weightlane.incoming import IncomingRing
    from weightlane.messages import ReadBack, ReceivePlan
    from weightlane.packing import WireDigest
    from weightlane.trace.read_back import ReadBackCheck
    from weightlane.trace.table import PlacementTable


@dataclass(slots=True)
class Attached:
    """A lane's plan on this worker, and the ring it reads (`shm`, `cuda_ipc`).

    `last_sync` is the last one that it has opened, `table` that of the plan, where a sync is to be read back,
    `was_read_back` whether one was.
    """

    plan: ReceivePlan
    ring: IncomingRing | None = None
    last_sync: int = 0
    table: PlacementTable | None = None
    was_read_back: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether its trainer was killed, as far as this worker can tell."""
        return self.ring.is_abandoned() if self.ring else is_gone(self.plan.owner)

    def read_back(self, origin: str) -> ReadBackCheck | None:
        """What the sync that opens now is to be read back with; None where it is not."""
        if self.table is None or (self.was_read_back and self.plan.read_back == "first"):
            return None
        from weightlane.trace.read_back import ReadBackCheck

        return ReadBackCheck(self.table, origin=origin)

    def require_newer(self, sync: int) -> None:
        """Raises ProtocolError for a sync that has been here: syncs of a lane count up."""
        if sync <= self.last_sync:
            raise ProtocolError(
                f"Sync {sync} of lane {self.plan.lane} came after sync {self.last_sync}.",
                "A message was sent twice, or comes from another controller.",
                "Close the lane and connect again.",
            )


@dataclass(slots=True)
class BaseState:
    """The weights under any adapter: which base they are, as far as is known, and whether they are whole."""

    identity: str = ""
    whole: bool = True

    def written(self) -> None:
        """A sync makes its first write: what they were before is gone."""
        self.identity, self.whole = "", False

    def is_now(self, base: TrainedBase) -> None:
        """They are this base: compared by value, or written to the end and verified."""
        self.identity = base.identity

    def published(self) -> None:
        """The sync that wrote them was published."""
        self.whole = True


@dataclass(slots=True)
class OpenSync:
    """One sync between its first and its last bucket on this worker."""

    plan: ReceivePlan
    sync: int
    version: int
    digest: WireDigest | None
    collector: AdapterCollector | None = None
    binding: AdapterBinding | None = None
    read_back: ReadBackCheck | None = None
    equal: ReadBack | None = None
    started: float = field(default_factory=time.monotonic)
    begun: bool = False
    next_bucket: int = 0
    tensors: int = 0
    nbytes: int = 0
    loaded: int = 0
    wait_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def begun_cause(self) -> str:
        """Why this worker does not serve from the first write on, until this sync is published."""
        return f"Sync {self.sync} (version {self.version}) has begun and is not published."

    def report(self, worker: int) -> ReceiveReport:
        """What worker `worker` tells the controller of this sync."""
        return ReceiveReport(
            worker=worker,
            sync=self.sync,
            version=self.version,
            tensors=self.tensors,
            nbytes=self.nbytes,
            loaded=self.loaded,
            digest=self.digest.hexdigest() if self.digest else "",
            wait_seconds=self.wait_seconds,
            load_seconds=self.load_seconds,
            adapter=self.binding,
            read_back=self.equal,
        )


def require_open(opened: OpenSync | None, lane: str, sync: int, bucket: int | None, origin: str) -> OpenSync:
    """The open sync, if it is this one and this bucket is due; with bucket None, if all have come.

    Raises:
        ProtocolError: another sync is open, or none, or a bucket was lost or sent twice.
    """
    if opened is None or (opened.plan.lane, opened.sync) != (lane, sync):
        raise ProtocolError(f"Sync {sync} of lane {lane} is not open on {origin}.")
    expected = opened.next_bucket
    if bucket is not None and bucket != expected:
        raise ProtocolError(
            f"Bucket {bucket} of sync {sync} came where bucket {expected} was due.",
            "A message was lost or sent twice.",
        )
    if bucket is None and expected != len(opened.plan.buckets):
        raise ProtocolError(
            f"Sync {sync} was finished after {expected} of {len(opened.plan.buckets)} buckets."
        )
    return opened
