"""The controller's part of a commit: every replica is asked once more, then publishes, then goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import SyncError, WeightlaneError
from weightlane.sync_failure import partly_published

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from weightlane.membership import Membership
    from weightlane.replica_session import ReplicaSession


def publish_everywhere(
    sessions: Sequence[ReplicaSession],
    under: Sequence[ReplicaSession],
    published: list[int],
    *,
    sync: int,
    version: int,
) -> None:
    """Publishes on every replica, then lets generation go on.

    An adapter comes before the base `under` it, where that was sent in this sync: the engine is fenced until
    both are there, so that no request is answered by the one without the other.

    Args:
        sessions: of all that take part.
        under: the sessions of phase BASE, of those among them that were sent it.
        published: where the numbers of replicas that serve the version are noted.
        sync: its number.
        version: what is published.

    Raises:
        WeightlaneError: a replica failed; names those that serve the version already.
    """
    bases = {session.number: session for session in under}
    served: list[str] = []
    try:
        for session in sessions:
            session.publish(sync, version)
            if session.number in bases:
                bases[session.number].publish(sync, version)
            served.append(session.address)
            published.append(session.number)
        for session in sessions:
            if session.number in bases:
                bases[session.number].resume(version)
            session.resume(version)
    except WeightlaneError as error:
        raise partly_published(error, version, served) from error


def require_what_was_staged(
    members: Membership, missing: Collection[int], seconds: float, *, version: int
) -> None:
    """Every replica asked again: one that was made anew, or let its weights go, holds no staged version.

    Raises:
        SyncError: names each such replica; nothing has been published.
        WeightlaneError: a replica does not answer.
    """
    plan = members.plan
    sessions = {session.number: session for session in members.sessions}
    others: list[str] = []
    # A missing one that hangs would have every commit wait for it in vain.
    for answer in members.ask(seconds, missing=missing):
        if answer.error is not None:
            raise answer.error
        gone = any("weights" in worker.released for worker in answer.workers)
        if (
            gone
            or sessions[answer.replica].was_written_by_others(answer)
            or not answer.is_as_planned(plan.replicas[answer.replica], plan.digest())
        ):
            others.append(str(answer))
    if others:
        raise SyncError(
            f"Version {version} was staged and is not published: {'; '.join(others)}.",
            "Since it was staged, that engine was started anew, lost its plan or let its weights go, or "
            "somebody else published a version on it.",
            "Let one lane at a time sync to it, and sync again; nothing was published.",
        )
