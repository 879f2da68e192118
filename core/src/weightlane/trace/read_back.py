"""Read-back: whether what was sent is where the table says, once the engine has finished with it.

An engine may repack a tensor in place after a load, at the same shape: names, shapes, counts and digests of
what travelled all stay right, and every later write into it lands on other elements. Only the values tell.
Hashes are kept, never tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import xxhash

from weightlane.errors import VerificationError
from weightlane.messages import ReadBack
from weightlane.packing import dtype_name, memory_of, torch_dtype
from weightlane.trace.geometry import Region
from weightlane.trace.intervals import TooFineError, count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from weightlane.trace.table import Fill, Placement, PlacementTable, TracedTarget

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
        differing: dict[int, list[int]] = defaultdict(list)
        changed: dict[int, str] = {}
        elements = 0
        with torch.no_grad():
            for number, target in enumerate(self._table.targets):
                tensor = live.get(target.name)
                if target.form == "live" and (tensor is None or not _same_form(tensor, target)):
                    changed[number] = "is gone" if tensor is None else f"is now {_told(tensor)}"
            for position, sent in self._sent.items():
                item = self._table.placements[position]
                if item.target in changed:
                    continue
                elements += item.elements
                seen = live[self._table.targets[item.target].name]
                if (
                    _hash(_in_target(seen, item.target_offset, [(n, step) for n, _, step in item.axes]))
                    != sent
                ):
                    differing[item.target].append(position)
            wrong_fills, filled = self._wrong_fills(live, changed)
        written = {self._table.placements[position].target for position in self._sent}
        changed = {number: why for number, why in changed.items() if number in written}
        if differing or wrong_fills or changed:
            raise self._error(differing, wrong_fills, changed)
        return ReadBack(elements + filled, self._not_comparable())

    def _hash_sent(self, flat: Tensor, item: Placement) -> int:
        taken = flat.as_strided(
            [size for size, _, _ in item.axes],
            [step for _, step, _ in item.axes],
            flat.storage_offset() + item.source_offset,
        )
        for dtype in (*item.casts, self._table.targets[item.target].dtype):
            taken = taken.to(torch_dtype(dtype))
        return _hash(taken)

    def _wrong_fills(self, live: Mapping[str, Tensor], changed: Mapping[int, str]) -> tuple[set[int], int]:
        """Targets whose constants are others now, and how many elements were compared."""
        wrong: set[int] = set()
        compared = 0
        for fill in self._table.fills:
            target = self._table.targets[fill.target]
            if target.form != "live" or fill.target in changed or not self._was_loaded(fill.target):
                continue
            seen = _in_target(live[target.name], fill.offset, fill.axes)
            kept = self._kept(fill)
            values = seen if kept is None else seen[kept.to(seen.device)]
            compared += values.numel()
            constant = torch.full((), fill.value, device=seen.device).to(seen.dtype)
            if seen.dtype.is_floating_point and seen.dtype.itemsize == 1:
                values, constant = values.float(), constant.float()  # torch compares no such dtype
            same = values.isnan() if math.isnan(fill.value) else values == constant
            if not bool(same.all()):
                wrong.add(fill.target)
        return wrong, compared

    def _kept(self, fill: Fill) -> Tensor | None:
        """Which elements of a fill no placement has overwritten since: a mask in its shape, None for all."""
        placed = [item for item in self._table.placements if item.target == fill.target]
        regions = [
            Region(item.target_offset, tuple((n, step) for n, _, step in item.axes)) for item in placed
        ]
        try:
            if not count(regions, [Region(fill.offset, fill.axes)]).covered:
                return None
        except TooFineError:
            pass
        target = self._table.targets[fill.target]
        span = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride, strict=True))
        mask = torch.ones(span, dtype=torch.bool)
        for item in placed:
            _in_target(mask, item.target_offset, [(n, step) for n, _, step in item.axes]).fill_(False)
        return _in_target(mask, fill.offset, fill.axes)

    def _was_loaded(self, target: int) -> bool:
        return any(self._table.placements[position].target == target for position in self._sent)

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


def _in_target(tensor: Tensor, offset: int, axes: Sequence[tuple[int, int]]) -> Tensor:
    """The elements at `offset`, counted from the tensor's own first."""
    sizes, steps = [size for size, _ in axes], [step for _, step in axes]
    return tensor.detach().as_strided(sizes, steps, tensor.storage_offset() + offset)


def _hash(tensor: Tensor) -> int:
    """Over the values in their order, as bytes."""
    return xxhash.xxh3_64_intdigest(memory_of(tensor.contiguous().cpu()))


def _same_form(tensor: Tensor, target: TracedTarget) -> bool:
    form = (tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
    return form == (target.shape, target.stride, target.dtype)


def _told(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
