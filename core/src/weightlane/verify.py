"""Comparing what was sent with what the receivers report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import VerificationError
from weightlane.lane_messages import RankMoved, ReplicaReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.messages import ReceiveReport
    from weightlane.plan import LanePlan, ReplicaPlan


def verify_ranks(plan: LanePlan, moved: Sequence[RankMoved]) -> str:
    """The digest of what was sent; ranks that fed workers must have sent the same bytes.

    Raises:
        VerificationError: replicas of the trainer diverged, so that workers were fed different weights.
    """
    digests = {report.rank: report.digest for report in moved if report.digest}
    if len(set(digests.values())) > 1:
        told = ", ".join(f"rank {rank} {digest}" for rank, digest in sorted(digests.items()))
        raise VerificationError(
            f"Trainer ranks sent different bytes for the same tensors: {told}.",
            "Their copies of the model have diverged, so workers of one engine now hold different weights.",
            "Check what keeps the ranks equal (gradient all-reduce, seeds), then sync again.",
        )
    return next(iter(digests.values()), "")


def verify_replica(
    plan: LanePlan, replica: ReplicaPlan, moved: Sequence[RankMoved], reports: Sequence[ReceiveReport]
) -> ReplicaReport:
    """What the reports of one replica prove, in words.

    Raises:
        VerificationError: counts or digests differ between a worker and the rank that fed it.
    """
    if not replica.has_agent:
        words = "unavailable: this engine takes requests only, so nothing is known of what its workers wrote"
        return ReplicaReport(replica.replica, replica.address, words)
    if plan.verify == "off":
        return ReplicaReport(replica.replica, replica.address, "off", tuple(reports))
    problems: list[str] = []
    compared_digests = 0
    for report in reports:
        sender = moved[replica.peers[report.worker]]
        worker = f"worker {report.worker} of {replica.address}"
        for what, got, sent in (
            ("tensors received", report.tensors, len(plan.tensors)),
            ("bytes received", report.nbytes, plan.nbytes),
            ("tensors handed to the loader", report.loaded, len(plan.tensors)),
        ):
            if got != sent:
                problems.append(f"{worker}: {got} {what}, {sent} sent by rank {sender.rank}")
        if report.digest and sender.digest:
            compared_digests += 1
            if report.digest != sender.digest:
                problems.append(f"{worker}: digest {report.digest}, rank {sender.rank} sent {sender.digest}")
    if problems:
        raise VerificationError(
            f"What arrived is not what was sent: {'; '.join(problems)}.",
            "The transport or the receiver lost or changed data.",
            "The receiver is fenced until a sync succeeds; report this with the plan.",
        )
    words = f"counts equal on {len(reports)} worker{'' if len(reports) == 1 else 's'}"
    if compared_digests:
        words += f", digests equal on {compared_digests}"
    elif plan.verify == "digest":
        words += ", no digest: tensors went by reference"
    return ReplicaReport(replica.replica, replica.address, words, tuple(reports))
