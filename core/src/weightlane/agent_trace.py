"""The placement tables that an agent has: made by its plugin, kept for as long as the incarnation stands."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import xxhash

from weightlane.engine_agent import TracesLoads
from weightlane.errors import ProtocolError
from weightlane.messages import Traced
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.agent_state import OpenSync
    from weightlane.engine_agent import WorkerEngine
    from weightlane.messages import ReceivePlan, WireTensor
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
        about = f"{sources_digest(tensors)} {_forms_digest(engine)}"
        key = (backend, engine.current_incarnation(), about)
        table = self._kept.pop(key, None)
        if table is None:
            table = engine.trace(tensors)
        self._kept[key] = table  # at the end: the one used last
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return Traced(table)

    def of_plan(self, plan: ReceivePlan, worker: int, incarnation: str) -> PlacementTable | None:
        """The table that the plan was made from for this worker; None where no sync is to be read back.

        Raises:
            ProtocolError: the plan names a table that this incarnation has not given, or has given up.
        """
        digest = plan.tables.get(worker)
        if digest is None or plan.read_back == "never":
            return None
        for (made_by, made_for, _), table in self._kept.items():
            if (made_by, made_for) == (plan.backend, incarnation) and table.digest() == digest:
                return table
        raise ProtocolError(
            f"{self._origin} does not hold table {digest}, from which lane {plan.lane} was planned.",
            f"It keeps the last {_MOST_KEPT} that it was asked for in its life.",
            "Connect again.",
        )


def sources_digest(tensors: Sequence[WireTensor]) -> str:
    """Sixteen hex digits over names, shapes and dtypes, in their order."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(tuple(tensors)))


def _forms_digest(engine: TracesLoads) -> str:
    """Of what the model holds now: wrappers may be put on without another incarnation."""
    held = [
        (name, tuple(tensor.shape), str(tensor.dtype), type(tensor).__name__)
        for name, tensor in engine.live_tensors().items()
    ]
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(held))


def read_back(opened: OpenSync, engine: WorkerEngine) -> None:
    """After the engine's own processing, where this sync is to be read back: notes what was found equal.

    Raises:
        VerificationError: elements are not where they were written.
    """
    if opened.read_back is not None and isinstance(engine, TracesLoads):
        opened.equal = opened.read_back.require_equal(engine.live_tensors())
