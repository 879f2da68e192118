"""Comparing what was sent with what the receivers report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapter_check import binding_problems
from weightlane.adapters import adapter_ref
from weightlane.errors import VerificationError
from weightlane.lane_messages import RankMoved, ReplicaReport
from weightlane.types import TransportName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import AdapterBinding
    from weightlane.messages import ReadBack, ReceiveReport
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
            f"Trainer ranks of lane {plan.lane} sent different bytes for the same tensors: {told}.",
            "Their copies of the model have diverged, so workers of one engine now hold different weights.",
            "Check what keeps the ranks equal (gradient all-reduce, seeds), then sync again.",
        )
    return next(iter(digests.values()), "")


def verify_replica(
    plan: LanePlan,
    replica: ReplicaPlan,
    moved: Sequence[RankMoved],
    reports: Sequence[ReceiveReport],
    *,
    sync: int,
    version: int,
) -> ReplicaReport:
    """What the reports of one replica prove, in words.

    Raises:
        VerificationError: counts or digests differ between a worker and the rank that fed it, or a worker
            reports another sync or version than `sync` and `version`.
    """
    if not replica.has_agent:
        words = "unavailable: this engine takes requests only, so nothing is known of what its workers wrote"
        return ReplicaReport(replica.replica, replica.address, words)
    if plan.verify == "off":
        words = f"off{_read_back([report.read_back for report in reports])}"
        return ReplicaReport(replica.replica, replica.address, words, tuple(reports))
    problems: list[str] = []
    reported = [report.worker for report in reports]
    if reported != list(range(len(replica.peers))):
        raise VerificationError(
            f"{replica.address} reported for workers {reported}, not for each of {len(replica.peers)} once.",
            "A worker's report is missing, so nothing is known of what it wrote.",
            "The receiver is fenced until a sync succeeds; report this with the plan.",
        )
    for report in reports:
        if (report.sync, report.version) != (sync, version):
            problems.append(
                f"worker {report.worker} of {replica.address}: reports sync {report.sync} of version "
                f"{report.version}, not sync {sync} of version {version}"
            )
        problems += _compare(plan, replica, report, moved[replica.peers[report.worker]])
    if problems:
        raise VerificationError(
            f"What arrived is not what was sent: {'; '.join(problems)}.",
            "The transport or the receiver lost or changed data.",
            "The receiver is fenced until a sync succeeds; report this with the plan.",
        )
    words = f"counts equal on {len(reports)} worker{'' if len(reports) == 1 else 's'}"
    if plan.verify == "digest":
        by_reference = _by_reference(replica)
        words += (
            ", no digest: tensors went by reference" if by_reference else f", digests equal on {len(reports)}"
        )
    if plan.manifest.adapter is not None:
        words += f", adapter bound to {len(plan.manifest.adapter.target_modules)} modules on {len(reports)}"
    words += _read_back([report.read_back for report in reports])
    return ReplicaReport(replica.replica, replica.address, words, tuple(reports))


def with_read_back(report: ReplicaReport, equal: Sequence[ReadBack]) -> ReplicaReport:
    """The report of a replica that takes requests only, with what was found equal in its workers, if any."""
    if not equal:
        return report
    words = f"by requests, which tell nothing of what they wrote{_read_back(equal)}"
    return ReplicaReport(report.replica, report.address, words, report.workers, tuple(equal))


def with_binding(report: ReplicaReport, plan: LanePlan, binding: AdapterBinding) -> ReplicaReport:
    """The report of a replica that takes requests only, with what was read of the adapter that it holds."""
    modules = len(plan.manifest.adapter.target_modules) if plan.manifest.adapter else 0
    words = f"by one request, adapter bound to {len(binding.modules)} of {modules} modules"
    if binding.unread:
        words = f"by one request, adapter not read back: {binding.unread}"
    return ReplicaReport(report.replica, report.address, words, report.workers, report.read_back)


def _read_back(given: Sequence[ReadBack | None]) -> str:
    """What the workers found where their tables say; "" where none has looked."""
    found = [item for item in given if item is not None]
    if not found:
        return ""
    words = f", {sum(item.elements for item in found):,} elements read back equal on {len(found)}"
    hidden = sum(item.not_comparable for item in found)
    return f"{words}, {hidden:,} kept in another form and not compared" if hidden else words


def _compare(plan: LanePlan, replica: ReplicaPlan, report: ReceiveReport, sender: RankMoved) -> list[str]:
    worker = f"worker {report.worker} of {replica.address}"
    counts = (
        ("tensors received", report.tensors, len(plan.tensors)),
        ("bytes received", report.nbytes, plan.nbytes),
        ("tensors handed to the loader", report.loaded, len(plan.tensors)),
    )
    problems = [
        f"{worker}: {got} {what}, {sent} sent by rank {sender.rank}"
        for what, got, sent in counts
        if got != sent
    ]
    problems += [f"{worker}: {problem}" for problem in _binding(plan, replica, report)]
    if plan.read_back == "always" and replica.trace is not None and report.read_back is None:
        problems.append(f"{worker}: it has read nothing back")
    if plan.verify == "digest" and not _by_reference(replica):
        if not report.digest or not sender.digest:
            silent = worker if not report.digest else f"rank {sender.rank}"
            problems.append(f"{worker}: {silent} gave no digest to compare")
        elif report.digest != sender.digest:
            problems.append(f"{worker}: digest {report.digest}, rank {sender.rank} sent {sender.digest}")
    return problems


def _binding(plan: LanePlan, replica: ReplicaPlan, report: ReceiveReport) -> list[str]:
    config = plan.manifest.adapter
    if config is None or replica.adapter is None:
        return []
    if report.adapter is None:
        return [f"it tells nothing of where adapter {config.name} was bound"]
    if report.adapter.unread:
        return [f"it did not read back adapter {config.name}: {report.adapter.unread}"]
    return binding_problems(config, adapter_ref(config, replica.adapter.swap, report.version), report.adapter)


def _by_reference(replica: ReplicaPlan) -> bool:
    return replica.transport is TransportName.INPROCESS
