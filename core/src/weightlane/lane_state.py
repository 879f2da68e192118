"""Where a lane is, from what one rank knows without asking anybody."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.sample_version import PublishedVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from weightlane.lane_messages import SyncGo, SyncReport
    from weightlane.plan import LanePlan
    from weightlane.sync_failure import SyncProgress

LanePhase: TypeAlias = Literal["open", "staged", "published", "failed", "closed"]
"""`open`: connected, nothing moved yet. `staged`: a version is verified everywhere and serves nowhere.
`published`: the last sync was committed. `failed`: the last sync, or its commit, failed; the next one heals.
`closed`: `close` was called."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as this rank knows it; None stands for what it does not know.

    `incarnations` maps each worker to the one that the lane last took in. `held_version` is the version last
    published there by this lane. `servable` is False between a sync's first write and its publication, None
    where only the replica itself knows: whether a sync that failed had begun to write, or what it serves, if
    anything, since a sync went on without it. `paused`, `released` and `last_error` are the controller's to
    know; other ranks see None, () and "". `missing` is what the last sync went on without it for ("" if it
    took part).
    """

    replica: int
    address: str
    incarnations: tuple[tuple[int, str], ...]
    held_version: int | None = None
    servable: bool | None = True
    paused: bool | None = None
    released: tuple[str, ...] = ()
    missing: str = ""
    last_error: str = ""

    def __str__(self) -> str:
        serves = {True: "servable", False: "not servable", None: "servable unknown"}[self.servable]
        told = [
            f"version {self.held_version}" if self.held_version is not None else "no version yet",
            serves,
            *(["paused"] if self.paused else []),
            *([f"released {', '.join(self.released)}"] if self.released else []),
            *(["missing"] if self.missing else []),
            "incarnation " + ", ".join(word for _, word in self.incarnations),
        ]
        error = f"\n    last error: {self.last_error}" if self.last_error else ""
        return f"replica {self.replica} at {self.address}: {', '.join(told)}{error}"


@dataclass(frozen=True, slots=True)
class LaneState:
    """The lane as a whole; print it."""

    lane: str
    phase: LanePhase
    rank: int
    syncs: int
    staged_version: int | None
    published_version: int | None
    last_error: str
    replicas: tuple[ReplicaState, ...]

    def __str__(self) -> str:
        syncs = f"{self.syncs} sync{'' if self.syncs == 1 else 's'}"
        versions = f"published {self.published_version}, staged {self.staged_version}"
        lines = [f"lane {self.lane} on rank {self.rank}: {self.phase} after {syncs}, {versions}"]
        if self.last_error:
            lines.append(f"  last error: {self.last_error}")
        lines.extend(f"  {replica}" for replica in self.replicas)
        return "\n".join(lines)


@dataclass(slots=True)
class LaneRecord:
    """Notes each step of a lane on one rank, and gives the picture of it."""

    rank: int
    phase: LanePhase = "open"
    syncs: int = 0
    staged: SyncReport | None = None
    published: SyncReport | None = None
    last_error: str = ""
    versions: PublishedVersions = field(default_factory=PublishedVersions)
    _serving_on: frozenset[int] = frozenset()
    _rewritten: frozenset[int] = frozenset()
    _replicas: dict[int, ReplicaState] = field(default_factory=dict)

    def connected(self, plan: LanePlan) -> None:
        """The plan is attached everywhere. Where generation goes on during a sync, what served serves on."""
        self._serving_on = frozenset(item.replica for item in plan.replicas if item.generation == "goes-on")
        for replica in plan.replicas:
            self._replicas[replica.replica] = ReplicaState(
                replica.replica, replica.address, tuple(sorted(replica.incarnations.items()))
            )

    def started(self, go: SyncGo) -> None:
        """All that take part in a sync begin it; those that came back hold no version of this lane."""
        known = self._replicas
        for item in go.rejoining:
            incarnations = tuple(sorted(item.incarnations.items()))
            known[item.replica] = replace(
                known[item.replica], incarnations=incarnations, held_version=None, servable=True
            )
        missing = {item.replica: item.cause for item in go.missing}
        for number, state in known.items():
            cause = missing.get(number, "")
            known[number] = replace(state, missing=cause, servable=None if cause else state.servable)

    def base_written(self, replicas: Collection[int]) -> None:
        """The base is written on these: whatever adapter they served is gone, until a sync is published."""
        self._rewritten |= frozenset(replicas)

    def has_staged(self, report: SyncReport) -> None:
        """Every replica that takes part is written; it is fenced unless it serves on what it had."""
        self.phase, self.staged, self.last_error = "staged", report, ""
        for number in self._taking_part():
            serves_on = number in self._serving_on - self._rewritten
            self._replicas[number] = replace(self._replicas[number], servable=serves_on)

    def has_published(self, report: SyncReport) -> None:
        """Every replica that took part serves the version."""
        self.phase, self.staged, self.published = "published", None, report
        self.versions.add(report.version)
        self._rewritten -= frozenset(self._taking_part())
        self._serve(self._taking_part(), report.version)

    def has_failed(
        self, error: BaseException, progress: SyncProgress, version: int, published: Collection[int]
    ) -> None:
        """A sync or a commit ended early; `published` is what the controller knows to serve already."""
        self.phase, self.staged = "failed", None
        self.last_error = f"{type(error).__name__}: {error}"
        self._serve(published, version)
        self._rewritten -= frozenset(published)
        for number in self._rewritten if progress == "starting" else self._taking_part():
            if number not in published and number not in self._serving_on - self._rewritten:
                servable = None if progress == "moving" else False
                self._replicas[number] = replace(self._replicas[number], servable=servable)

    def state(self, plan: LanePlan, of_session: Callable[[ReplicaState], ReplicaState]) -> LaneState:
        """The picture; `of_session` adds what the controller's sessions know."""
        return LaneState(
            lane=plan.lane,
            phase=self.phase,
            rank=self.rank,
            syncs=self.syncs,
            staged_version=self.staged.version if self.staged else None,
            published_version=self.published.version if self.published else None,
            last_error=self.last_error,
            replicas=tuple(of_session(self._replicas[replica.replica]) for replica in plan.replicas),
        )

    def _taking_part(self) -> list[int]:
        return [number for number, state in self._replicas.items() if not state.missing]

    def _serve(self, replicas: Collection[int], version: int) -> None:
        for number in replicas:
            self._replicas[number] = replace(self._replicas[number], held_version=version, servable=True)
