"""Which replicas load a version from the lane's folder; they change when one comes back or is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlane.types import TransportName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from weightlane.plan import LanePlan
    from weightlane.replica_session import ReplicaSession
    from weightlane.transports.disk import WrittenVersion


@dataclass(slots=True)
class FolderReceivers:
    """Iterates over what starts each replica's loading; `missing` are left out of the sync at hand."""

    plan: LanePlan
    sessions: tuple[ReplicaSession, ...]
    missing: Collection[int] = field(default_factory=frozenset)

    def __iter__(self) -> Iterator[Callable[[WrittenVersion], None]]:
        """In replica order."""
        for session in self.sessions:
            over_disk = self.plan.replicas[session.number].transport is TransportName.DISK
            if over_disk and session.number not in self.missing:
                yield session.load_from_disk
