"""Read-back of a replica that takes requests only: hashed here as it is sent, asked for once it is loaded.

Where an agent runs, it does both inside the worker. Here the controller hashes, bucket by bucket, what its
requests carry, and the endpoint asks the engine for hashes of what it holds. No tensor is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.endpoint import ReadingBackEndpoint
from weightlane.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.endpoint import EngineEndpoint
    from weightlane.messages import ReadBack
    from weightlane.trace.read_back import ReadBackCheck
    from weightlane.trace.table import PlacementTable
    from weightlane.types import ReadBackPolicy


class RequestReadBack:
    """The read-backs of one replica through a lane's life; shared by its sink and its session.

    Args:
        endpoint: of the replica.
        tables: one per worker inside it, as the plan was made from them.
        policy: which syncs are read back.
        where: the replica's address, for messages.
    """

    def __init__(
        self,
        endpoint: ReadingBackEndpoint,
        tables: Sequence[PlacementTable],
        policy: ReadBackPolicy,
        where: str,
    ) -> None:
        self._endpoint = endpoint
        self._tables = tuple(tables)
        self._policy = policy
        self._where = where
        self._was_read_back = False
        self._checks: tuple[ReadBackCheck, ...] = ()

    @property
    def due(self) -> bool:
        """Whether the sync that is open, or the next one, is read back."""
        return self._policy == "always" or (self._policy == "first" and not self._was_read_back)

    def begin(self) -> None:
        """A sync begins: what an earlier one had sent is forgotten."""
        if not self.due:
            self._checks = ()
            return
        from weightlane.trace.read_back import ReadBackCheck

        self._checks = tuple(
            ReadBackCheck(table, origin=f"worker {table.key.worker} of {self._where}")
            for table in self._tables
        )

    def sent(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Notes what a request is about to carry: (wire name, whole tensor in the dtype that travels)."""
        for check in self._checks:
            check.arrived(tensors)

    def require_equal(self, seconds: float) -> tuple[ReadBack, ...]:
        """Asks the engine and compares; what was found equal, per worker.

        Args:
            seconds: bound of the one call that reaches all workers.

        Raises:
            VerificationError: elements are not where they were written; names targets and sources.
            EngineError, ProtocolError: the engine cannot tell, or tells of something else.
        """
        found = self._endpoint.read_back(self._tables, seconds)
        if len(found) != len(self._checks):
            raise ProtocolError(
                f"{self._where} read back {len(found)} workers, and {len(self._checks)} were sent to.",
                "Each worker that gave a table is read back.",
                "Report this to the plugin's authors.",
            )
        equal = tuple(check.require_same(seen) for check, seen in zip(self._checks, found, strict=True))
        self._was_read_back = True
        return equal


def read_back_by_request(
    endpoint: EngineEndpoint, tables: Sequence[PlacementTable], policy: ReadBackPolicy
) -> RequestReadBack | None:
    """For a replica without agents; None where nothing was traced or its endpoint cannot ask."""
    if not tables or policy == "never" or not isinstance(endpoint, ReadingBackEndpoint):
        return None
    return RequestReadBack(endpoint, tables, policy, endpoint.address)
