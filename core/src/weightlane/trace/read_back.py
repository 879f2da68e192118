"""Read-back: whether what was sent is where the table says, once the engine has finished with it.

An engine may repack a tensor in place after a load, at the same shape: names, shapes, counts and digests of
what travelled all stay right, and every later write into it lands on other elements. Only the values tell.
Hashes are kept, never tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from weightlane.errors import ProtocolError, VerificationError
from weightlane.messages import ReadBack
from weightlane.packing import torch_dtype
from weightlane.trace.live_hashes import hash_of, live_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from weightlane.trace.table import LiveHashes, Placement, PlacementTable

_MOST_TOLD = 5
_MOST_SOURCES = 3


class ReadBackCheck:
    """The hashes of one sync: given every bucket as it arrives, then asked once.

    Args:
        table: of this worker, about the tensors that are sent.
        origin: how the worker names itself in errors.
    """

    def __init__(self, table: PlacementTable, *, origin: str) -> None:
        self._table = table
        self._origin = origin
        self._number = {source.wire: number for number, source in enumerate(table.sources)}
        self._of_source: dict[int, list[int]] = defaultdict(list)
        for position, item in enumerate(table.placements):
            if table.targets[item.target].form == "live":
                self._of_source[item.source].append(position)
        self._sent: dict[int, int] = {}

    def arrived(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Notes what the loader is about to be given: (wire name, whole tensor)."""
        with torch.no_grad():
            for name, tensor in tensors:
                positions = self._of_source.get(self._number.get(name, -1), ())
                if not positions:
                    continue
                # A view that is conjugated or negated when it is read has other bytes than values.
                flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
                for position in positions:
                    self._sent[position] = self._hash_sent(flat, self._table.placements[position])

    def require_equal(self, live: Mapping[str, Tensor]) -> ReadBack:
        """Compares every placement and every constant with the live tensors.

        Args:
            live: the model's tensors by name, as they are after the engine's own processing.

        Raises:
            VerificationError: elements are not where they were written; names targets and sources.
        """
        return self.require_same(live_hashes(self._table, live))

    def require_same(self, seen: LiveHashes) -> ReadBack:
        """Compares what was sent with what a worker says that it holds.

        Args:
            seen: about this very table.

        Raises:
            VerificationError: as `require_equal`.
            ProtocolError: it is about another table.
        """
        self._require_about_this(seen)
        table = self._table
        differing: dict[int, list[int]] = defaultdict(list)
        elements = 0
        for position, sent in self._sent.items():
            item = table.placements[position]
            if item.target in seen.changed:
                continue
            elements += item.elements
            if seen.placements[position] != sent:
                differing[item.target].append(position)
        written = {table.placements[position].target for position in self._sent}
        wrong_fills = {table.fills[number].target for number in seen.unlike} & written
        changed = {number: why for number, why in seen.changed.items() if number in written}
        if differing or wrong_fills or changed:
            raise self._error(differing, wrong_fills, changed)
        filled = sum(
            compared
            for fill, compared in zip(table.fills, seen.filled, strict=True)
            if fill.target in written
        )
        return ReadBack(elements + filled, self._not_comparable())

    def _require_about_this(self, seen: LiveHashes) -> None:
        table = self._table
        fits = (
            seen.table == table.digest()
            and (len(seen.placements), len(seen.filled)) == (len(table.placements), len(table.fills))
            and all(0 <= number < len(table.fills) for number in seen.unlike)
        )
        if not fits:
            raise ProtocolError(
                f"{self._origin} read back table {seen.table}, not {table.digest()}.",
                "Its answer is about another load than the one that was planned.",
                "Connect again; report this with the plan if it stays so.",
            )

    def _hash_sent(self, flat: Tensor, item: Placement) -> int:
        taken = flat.as_strided(
            [size for size, _, _ in item.axes],
            [step for _, step, _ in item.axes],
            flat.storage_offset() + item.source_offset,
        )
        for dtype in (*item.casts, self._table.targets[item.target].dtype):
            taken = taken.to(torch_dtype(dtype))
        return hash_of(taken)

    def _not_comparable(self) -> int:
        table = self._table
        return sum(item.elements for item in table.placements if table.targets[item.target].form != "live")

    def _error(
        self, differing: Mapping[int, list[int]], wrong_fills: set[int], changed: Mapping[int, str]
    ) -> VerificationError:
        told: list[str] = []
        for number, positions in differing.items():
            of_target = [p for p in self._sent if self._table.placements[p].target == number]
            names = dict.fromkeys(
                self._table.sources[self._table.placements[p].source].canonical for p in positions
            )
            more = f" and {len(names) - _MOST_SOURCES} more" if len(names) > _MOST_SOURCES else ""
            told.append(
                f"{self._table.targets[number].name} (from {', '.join(list(names)[:_MOST_SOURCES])}{more}; "
                f"{len(positions)} of {len(of_target)} placements differ)"
            )
        told += [f"{self._table.targets[number].name} (its padding)" for number in sorted(wrong_fills)]
        told += [f"{self._table.targets[number].name} ({why})" for number, why in changed.items()]
        more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        return VerificationError(
            f"What {self._origin} holds after the load is not what was sent, in "
            f"{'; '.join(told[:_MOST_TOLD])}{more}.",
            "The engine repacked or post-processed these tensors in place, or its loader did another thing "
            "with values than without: elements are not where they were written.",
            'Report the architecture with the plan. read_back="never" leaves this check out; only do that '
            "where the engine's outputs are known to be right.",
        )
