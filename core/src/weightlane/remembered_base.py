"""Which base a replica that takes requests only holds: what this lane sent it, until somebody else comes.

Such an engine cannot tell its base, but it tells a version. While that is the one that this lane published
last, nobody who labels what he writes has written since; an engine that was started anew, unnoticed, has
another one too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from weightlane.program import Program
    from weightlane.residency import WorkerResidency


class RememberedBase:
    """One replica's.

    Args:
        program: of the replica in phase BASE; where it publishes no version, memory alone counts.
    """

    def __init__(self, program: Program) -> None:
        self._labelled = publishes_version(program)
        self._identity = ""
        self._version: int | None = None

    def sent(self, identity: str, version: int) -> None:
        """It holds this base, and its version was published."""
        self._identity, self._version = identity, version

    def relabelled(self, version: int) -> None:
        """This lane published another version there, the base as it was."""
        self._version = version

    def forget(self) -> None:
        """It is about to be written."""
        self._identity = ""

    def as_told(self, worker: WorkerResidency) -> WorkerResidency:
        """A worker's answer with the base that it holds, or with why it is not taken to hold it any more."""
        if self._identity and self._labelled and worker.held_version != self._version:
            cause = (
                f"it tells version {worker.held_version}, and this lane published {self._version}: somebody "
                "else wrote its weights, or it was started anew"
            )
            return msgspec.structs.replace(worker, base="", cause=cause)
        return msgspec.structs.replace(worker, base=self._identity)


def publishes_version(program: Program) -> bool:
    """Whether publishing sets the version that the engine then tells."""
    return any(call.version_field for call in program.publish)
