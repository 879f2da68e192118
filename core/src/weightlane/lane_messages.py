"""Messages between the ranks of a lane, over the control channel."""

from __future__ import annotations

import msgspec

from weightlane.control import RankPlace
from weightlane.device_memory import DeviceMemoryHandle
from weightlane.manifest import RankManifest
from weightlane.messages import ReadBack, ReceiveReport
from weightlane.plan import LanePlan
from weightlane.types import Phase


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="joined"):
    """A rank's first word: where it is, what it exports, and the arguments it gave to `connect`."""

    place: RankPlace
    manifest: RankManifest
    arguments: dict[str, str]


class Planned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="planned"):
    """The controller's plan, for everyone."""

    plan: LanePlan
    places: tuple[RankPlace, ...]


class RingPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ring that a rank made for one worker of one replica; over `cuda_ipc` with memory of their GPU."""

    replica: int
    worker: int
    path: str
    memory: DeviceMemoryHandle | None = None


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """A rank has made its rings."""

    rings: tuple[RingPlace, ...]


class Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="go"):
    """All ranks and all engines are at this point; collectives may start."""


class SyncStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync-start"):
    """A rank has called `stage` or `sync` with this version.

    `joined` tells, per replica, the sync at which this rank last made rings for it (0: at connect). A rank
    that was interrupted while a replica came back tells an older one, and the replica joins anew.
    """

    version: int
    plan_digest: str
    joined: tuple[int, ...] = ()


class Rejoining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica that was started anew, fits the plan, and gets new rings before this sync."""

    replica: int
    incarnations: dict[int, str]


class MissingReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica that did not answer and that the lane went on without (`missing_replicas="skip"`)."""

    replica: int
    address: str
    cause: str


class NeedsBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica that does not hold the base under the lane's adapter, and why that is known."""

    replica: int
    why: str


class SyncGo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync-go"):
    """The controller's verdict on a sync's start. With `rejoining`, rings come before the first bucket.

    `needs_base` lists, in phase BASE, the replicas that are sent it; all others are left as they are.
    """

    rejoining: tuple[Rejoining, ...] = ()
    missing: tuple[MissingReplica, ...] = ()
    needs_base: tuple[NeedsBase, ...] = ()


class RankMoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rank-moved"):
    """What one rank sent: tensors and bytes per worker it feeds (0 when it only drained), and its digest.

    `update_lost` is what its stream tells (`weightlane.stream.TellsRounding`): None where nothing was merged.
    """

    rank: int
    tensors: int
    nbytes: int
    digest: str
    seconds: float
    update_lost: float | None = None


class ReplicaReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica's side of a sync. `verified` says in words what the reports prove.

    `read_back` is per worker what was found equal where no agent reports it.
    """

    replica: int
    address: str
    verified: str
    workers: tuple[ReceiveReport, ...] = ()
    read_back: tuple[ReadBack, ...] = ()


class PhaseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One phase of a sync: which replicas it went to, and what each of them received.

    `why` tells, in phase BASE, per replica why it did not hold the base.
    """

    phase: Phase
    replicas: tuple[int, ...]
    tensors: int
    nbytes: int
    seconds: float
    verified: tuple[str, ...]
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        to = ", ".join(str(number) for number in self.replicas)
        why = f" ({'; '.join(self.why)})" if self.why else ""
        return f"{self.phase.value}: {self.tensors} tensors, {self.nbytes} bytes to replica {to}{why}"


class SyncReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync-report"):
    """What one sync did.

    `seconds` is the controller's wall time from its call to the last replica's report. `digest` is over the
    travelling bytes ("" at level `counts`); `unchanged_since` names the last published version with the same
    digest, which is an alarm if the optimizer stepped in between. `missing` lists replicas that the lane went
    on without; `rejoined` those that had been started anew and were brought level by this sync. `phases` has
    each phase that ran, in order; all other figures are the last one's.

    `update_lost` is the share, from 0 to 1, of the adapters' change that rounding merged weights to their own
    dtype took away: the root of the sum of squares of what was lost, over that of the whole change, both over
    every merged element. 0 where nothing is rounded (float32), a few hundredths in bfloat16, and near 1 where
    the change is too small for the weights' dtype and the engine serves almost the base. It is the largest
    that any rank tells; None where nothing was merged, and of a trainer backend that does not measure it.
    """

    lane: str
    sync: int
    version: int
    tensors: int
    nbytes: int
    buckets: int
    seconds: float
    digest: str
    unchanged_since: int | None
    replicas: tuple[ReplicaReport, ...]
    missing: tuple[MissingReplica, ...] = ()
    rejoined: tuple[int, ...] = ()
    phases: tuple[PhaseReport, ...] = ()
    update_lost: float | None = None


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="committed"):
    """Every replica serves this version."""

    version: int
