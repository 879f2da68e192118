"""What the controller makes of a sync: every worker's report, compared, and one report of the whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightlane.lane_messages import PhaseReport, RankMoved, SyncReport
from weightlane.replica_session import take_steps
from weightlane.schedule import AFTER_MOVE
from weightlane.verify import verify_ranks, verify_replica, with_binding, with_read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightlane.events import EventSource
    from weightlane.lane_messages import ReplicaReport, SyncGo
    from weightlane.plan import LanePlan
    from weightlane.replica_session import ReplicaSession


def verified_replicas(
    plan: LanePlan,
    sessions: Sequence[ReplicaSession],
    moved: Sequence[RankMoved],
    events: EventSource,
    check: Callable[[], None],
    *,
    sync: int,
    version: int,
) -> list[ReplicaReport]:
    """Every worker's report of every replica, compared; what follows the move runs after that.

    Raises:
        VerificationError: what arrived, or was bound or read back, is not what was sent.
    """

    def tell(report: ReplicaReport) -> None:
        events.tell("replica-reported", version, detail=f"{report.address}: {report.verified}")

    reports: list[ReplicaReport] = []
    for session in sessions:
        replica = plan.replicas[session.number]
        workers = session.reports(sync, check)
        bound = session.load_adapter(version)
        reports.append(verify_replica(plan, replica, moved, workers, sync=sync, version=version))
        if bound is not None:
            reports[-1] = with_binding(reports[-1], plan, bound)
        if session.read_back is None:
            tell(reports[-1])
    take_steps(AFTER_MOVE, sessions, version)
    for number, session in enumerate(sessions):
        if session.read_back is not None:
            # Only now: an engine may go on with its weights until it has settled.
            reports[number] = with_read_back(reports[number], session.read_back_equal())
            tell(reports[number])
    return reports


def report_of(
    plan: LanePlan,
    go: SyncGo,
    moved: Sequence[RankMoved],
    replicas: Sequence[ReplicaReport],
    before: SyncReport | None,
    earlier: Sequence[PhaseReport],
    *,
    sync: int,
    version: int,
    started: float,
) -> SyncReport:
    """The report of one part of a sync; `earlier` are the phases that ran before it in the same sync.

    `before` is what was last published, for the stale alarm, `started` the clock at the beginning.
    """
    digest = verify_ranks(plan, moved)
    seconds = time.monotonic() - started
    phase = PhaseReport(
        phase=plan.phase,
        replicas=tuple(report.replica for report in replicas),
        tensors=len(plan.tensors),
        nbytes=plan.nbytes,
        seconds=seconds,
        verified=tuple(report.verified for report in replicas),
        why=tuple(f"replica {item.replica}: {item.why}" for item in go.needs_base),
    )
    return SyncReport(
        lane=plan.lane,
        sync=sync,
        version=version,
        tensors=len(plan.tensors),
        nbytes=plan.nbytes,
        buckets=len(plan.buckets),
        seconds=seconds,
        digest=digest,
        unchanged_since=before.version if before and digest and before.digest == digest else None,
        replicas=tuple(replicas),
        missing=go.missing,
        rejoined=tuple(item.replica for item in go.rejoining),
        phases=(*earlier, phase),
        update_lost=max((rank.update_lost for rank in moved if rank.update_lost is not None), default=None),
    )
