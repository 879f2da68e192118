"""Gathers an adapter out of the buckets of a sync: no engine can be given part of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


class AdapterCollector:
    """Every tensor of one sync under its wire name, in memory of its own.

    A bucket's views live until the bucket is released, and its memory is written again two buckets later: a
    view that is kept turns into another tensor's values (verl #6454).
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Keeps a copy of each tensor of one bucket; `tensors` may be empty.

        Raises:
            SyncError: a name came before in this sync.
        """
        for name, tensor in tensors:
            if name in self._held:
                raise SyncError(f"{name} came twice in one sync.", "Which of the two is right is not known.")
            self._held[name] = owned(tensor)

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Everything, once it is all here, in the order of `names`; the collector is empty afterwards.

        Raises:
            SyncError: a name never came.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self._held]
        if missing:
            raise SyncError(
                f"The adapter is incomplete: {missing[0]} and {len(missing) - 1} more never came.",
                "An adapter is loaded whole or not at all.",
            )
        held, self._held = self._held, {}
        return {name: held[name] for name in wanted}


def owned(tensor: Tensor) -> Tensor:
    """A copy that shares memory with nothing."""
    return tensor.detach().clone()
