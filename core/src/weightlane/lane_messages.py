"""Messages between the ranks of a lane, over the control channel."""

from __future__ import annotations

import msgspec

from weightlane.control import RankPlace
from weightlane.manifest import RankManifest
from weightlane.messages import ReceiveReport
from weightlane.plan import LanePlan


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
    """A ring that a rank made for one worker of one replica."""

    replica: int
    worker: int
    path: str


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """A rank has made its rings."""

    rings: tuple[RingPlace, ...]


class Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="go"):
    """All ranks and all engines are at this point; collectives may start."""


class SyncStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync-start"):
    """A rank has called `stage` or `sync` with this version."""

    version: int
    plan_digest: str


class RankMoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rank-moved"):
    """What one rank sent: tensors and bytes per worker it feeds (0 when it only drained), and its digest."""

    rank: int
    tensors: int
    nbytes: int
    digest: str
    seconds: float


class ReplicaReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica's side of a sync. `verified` says in words what the reports prove."""

    replica: int
    address: str
    verified: str
    workers: tuple[ReceiveReport, ...] = ()


class SyncReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync-report"):
    """What one sync did.

    `seconds` is the controller's wall time from its call to the last replica's report. `digest` is over the
    travelling bytes ("" at level `counts`); `unchanged_since` names the last published version with the same
    digest, which is an alarm if the optimizer stepped in between.
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


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="committed"):
    """Every replica serves this version."""

    version: int
