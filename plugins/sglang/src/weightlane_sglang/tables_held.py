"""The tables that one scheduler has given: by digest, the latest few, for as long as its model stands.

A table is megabytes, and its digest sixteen digits: so a read-back names it. A server that was started anew
holds none, and one whose model was made anew forgets those of the model before.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from weightlane.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from weightlane.trace.table import PlacementTable

_MOST_HELD = 4


class TablesHeld:
    """Of one process; its scheduler calls it from one thread."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, PlacementTable] = OrderedDict()
        self._model: weakref.ref[nn.Module] | None = None

    def keep(self, table: PlacementTable, model: nn.Module) -> PlacementTable:
        """Holds it as the one used last; gives it."""
        self._forget_unless(model)
        digest = table.digest()
        self._tables[digest] = table
        self._tables.move_to_end(digest)
        while len(self._tables) > _MOST_HELD:
            self._tables.popitem(last=False)
        return table

    def of_rank(self, digests: Sequence[str], rank: int, model: nn.Module) -> PlacementTable:
        """That of this rank, about this model.

        Raises:
            ProtocolError: it was never given, or was given up.
        """
        self._forget_unless(model)
        wanted = digests[rank] if rank < len(digests) else ""
        table = self._tables.get(wanted)
        if table is None:
            raise ProtocolError(
                f"TP rank {rank} does not hold table {wanted or '(none)'}, which a lane was planned from.",
                f"It keeps the last {_MOST_HELD} that it gave in its life, for as long as its model stands.",
                "Connect again.",
            )
        self._tables.move_to_end(wanted)
        return table

    def _forget_unless(self, model: nn.Module) -> None:
        if self._model is None or self._model() is not model:
            self._tables.clear()
            self._model = weakref.ref(model)
