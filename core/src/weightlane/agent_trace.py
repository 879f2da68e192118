"""The placement tables that an agent has: made by its plugin, kept for as long as the incarnation stands."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import xxhash

from weightlane.engine_agent import TracesLoads
from weightlane.messages import Traced
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.engine_agent import WorkerEngine
    from weightlane.messages import WireTensor
    from weightlane.trace.table import PlacementTable

_MOST_KEPT = 4
"""A worker has as many kinds of lanes at most; a table of a large model takes some megabytes."""


class KeptTables:
    """Tables by incarnation and sources, the latest few.

    Args:
        origin: how the worker names itself in messages.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._kept: OrderedDict[tuple[str, str, str], PlacementTable] = OrderedDict()

    def answer(self, engine: WorkerEngine, backend: str, tensors: Sequence[WireTensor]) -> Traced | Untraced:
        """The table of one load of `tensors`: the one that is kept, or a new one; or why there is none."""
        if not isinstance(engine, TracesLoads):
            return Untraced(f"{type(engine).__name__} of {self._origin} cannot run its loader without data")
        key = (backend, engine.current_incarnation(), sources_digest(tensors))
        table = self._kept.pop(key, None)
        if table is None:
            table = engine.trace(tensors)
        self._kept[key] = table  # at the end: the one used last
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return Traced(table)

    def find(self, backend: str, incarnation: str, digest: str) -> PlacementTable | None:
        """The table with this digest, if this incarnation made it."""
        for (made_by, made_for, _), table in self._kept.items():
            if (made_by, made_for) == (backend, incarnation) and table.digest() == digest:
                return table
        return None


def sources_digest(tensors: Sequence[WireTensor]) -> str:
    """Sixteen hex digits over names, shapes and dtypes, in their order."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(tuple(tensors)))
