"""Whole tensors from the parts of all ranks: small ones together, large ones one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from weightlane_fsdp.boxes import Box
    from weightlane_fsdp.collectives import Collectives
    from weightlane_fsdp.held import Held

SMALL = 1 << 20
"""Bytes below which a tensor is gathered together with others: a call costs more than its bytes there."""

_ALIGNMENT = 16  # bytes; a multiple of every dtype's size
_WORTH_PADDING = 1.5
"""A gather of parts of unequal size pads them to the largest. Above this share of waste each rank's part is
broadcast instead."""


class Gathering:
    """Makes whole tensors in storage of their own; every rank of a tensor's group calls it alike.

    A rank that does not want them takes part, and puts nothing together.

    Args:
        collectives: this sync's.
        block_bytes: at most so much is gathered beside the tensors themselves.
        staged: parts that were brought to the device already, by key.
        wanted: whether this rank uses what it gathers.
    """

    def __init__(
        self, collectives: Collectives, block_bytes: int, staged: Mapping[str, Tensor], *, wanted: bool
    ) -> None:
        self._collectives = collectives
        self._device = collectives.device
        self._block_bytes = block_bytes
        self._staged = staged
        self._wanted = wanted

    def whole_here(self, held: Held) -> Tensor:
        """A copy of a tensor that nothing is to gather for."""
        part = self._part(held)
        copied = part.clone() if self._aliases(held, part) else part
        return _shaped(copied, held)

    def together(self, items: Sequence[Held]) -> dict[str, Tensor]:
        """Small tensors of one group, by key, in one collective for each block of bytes."""
        found: dict[str, Tensor] = {}
        for block in _blocks(items, self._block_bytes):
            found.update(self._block(block))
        return found

    def alone(self, held: Held) -> Tensor:
        """A large tensor: straight into its place where parts are ranges of it, else block by block."""
        whole = self._empty(held.frame, held.dtype, room=_room(held) or 0)
        if all(box.elements == 0 for box in held.boxes):
            return _shaped(whole, held)
        if _is_ranges(held):
            self._ranges(held, whole)
        else:
            self._rows(held, whole)
        return _shaped(whole, held)

    # -- small ones ---------------------------------------------------------------------------------------

    def _block(self, items: Sequence[Held]) -> dict[str, Tensor]:
        ranks = items[0].ranks
        starts: list[list[int]] = [[] for _ in ranks]
        sizes = [0] * len(ranks)
        for held in items:
            for number, box in enumerate(held.boxes):
                starts[number].append(sizes[number])
                sizes[number] += _aligned(box.elements * held.dtype.itemsize)
        me = ranks.index(self._rank)
        mine = torch.empty(sizes[me], dtype=torch.uint8, device=self._device)
        for held, start in zip(items, starts[me], strict=True):
            _put(mine, start, self._part(held))
        blocks = self._from_all(mine, sizes, ranks)
        if not self._wanted:
            return {}
        found = {}
        for number, held in enumerate(items):
            whole = self._empty(held.frame, held.dtype)
            for at, box in enumerate(held.boxes):
                _view(whole, box).copy_(_taken(blocks[at], starts[at][number], held.dtype, box.size))
            found[held.source.key] = _shaped(whole, held)
        return found

    def _from_all(self, mine: Tensor, sizes: Sequence[int], ranks: tuple[int, ...]) -> Sequence[Tensor]:
        """Every rank's bytes."""
        longest, total = max(sizes), sum(sizes)
        if longest == 0:
            return [mine] * len(ranks)
        if longest * len(ranks) <= total * _WORTH_PADDING:
            padded = torch.empty(longest, dtype=torch.uint8, device=self._device)
            padded[: len(mine)] = mine
            out = torch.empty(longest * len(ranks), dtype=torch.uint8, device=self._device)
            self._collectives.all_gather(out, padded, ranks)  # bounded by `Collectives`
            return torch.split(out, longest)
        out = torch.empty(total, dtype=torch.uint8, device=self._device)
        parts = torch.split(out, list(sizes))
        parts[ranks.index(self._rank)].copy_(mine)
        for rank, part in zip(ranks, parts, strict=True):
            if len(part):
                self._collectives.broadcast(part, rank, ranks)  # bounded by `Collectives`
        return parts

    # -- large ones ---------------------------------------------------------------------------------------

    def _ranges(self, held: Held, whole: Tensor) -> None:
        """Parts are ranges of the whole's own memory."""
        part = self._part(held).reshape(-1)
        if _room(held) is not None:
            longest = max(box.elements for box in held.boxes)
            mine = part
            if len(part) < longest:
                mine = torch.empty(longest, dtype=held.dtype, device=self._device)
                mine[: len(part)] = part
            # The room beyond the whole, where the last parts' padding goes, is part of the same storage.
            out = whole.as_strided((longest * len(held.boxes),), (1,))
            self._collectives.all_gather(_bytes(out), _bytes(mine), held.ranks)  # bounded by `Collectives`
            return
        flat = whole.reshape(-1)
        for box in held.boxes:
            if box.elements:
                first = box.start[0] * math.prod(held.frame[1:])
                place = flat[first : first + box.elements]
                if box.rank == self._rank:
                    place.copy_(part)
                # Bounded by `Collectives`.
                self._collectives.broadcast(_bytes(place), box.rank, held.ranks)

    def _rows(self, held: Held, whole: Tensor) -> None:
        """Parts cut inner dimensions: some rows of every part at a time."""
        part = self._part(held)
        rows = max(box.size[0] for box in held.boxes)
        row_bytes = max(math.prod(box.size[1:]) for box in held.boxes) * held.dtype.itemsize
        at_once = max(1, self._block_bytes // max(1, row_bytes * len(held.boxes)))
        for first in range(0, rows, at_once):
            cut = [max(0, min(first + at_once, box.size[0]) - first) for box in held.boxes]
            sizes = [
                count * math.prod(box.size[1:]) * held.dtype.itemsize
                for count, box in zip(cut, held.boxes, strict=True)
            ]
            mine = _bytes(part[first : first + at_once].contiguous())
            blocks = self._from_all(mine, sizes, held.ranks)
            if not self._wanted:
                continue
            for count, block, box in zip(cut, blocks, held.boxes, strict=True):
                size = (count, *box.size[1:])
                if math.prod(size):
                    start = (box.start[0] + first, *box.start[1:])
                    _slices(whole, start, size).copy_(_taken(block, 0, held.dtype, size))

    # -- parts ----------------------------------------------------------------------------------------------

    def _part(self, held: Held) -> Tensor:
        """This rank's part on the device of the group, in the dtype of the export, contiguous."""
        part = self._staged.get(held.source.key, held.part)
        part = part.to(self._device, held.dtype)
        return part.resolve_conj().resolve_neg().contiguous()

    def _aliases(self, held: Held, part: Tensor) -> bool:
        return part.data_ptr() in (
            held.part.data_ptr(),
            self._staged.get(held.source.key, held.part).data_ptr(),
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, room: int = 0) -> Tensor:
        count = math.prod(shape)
        return torch.empty(count + room, dtype=dtype, device=self._device)[:count].view(shape)

    @property
    def _rank(self) -> int:
        return self._collectives.rank


def _blocks(items: Iterable[Held], most: int) -> Iterable[list[Held]]:
    block: list[Held] = []
    nbytes = 0
    for held in items:
        if block and nbytes + held.nbytes > most:
            yield block
            block, nbytes = [], 0
        block.append(held)
        nbytes += held.nbytes
    if block:
        yield block


def _shaped(whole: Tensor, held: Held) -> Tensor:
    shape = held.source.shape
    return whole.as_strided(shape, held.stride) if held.stride else whole.view(shape)


def _is_ranges(held: Held) -> bool:
    """Whether each part is one range of the whole's memory: it is cut along its first dimension alone."""
    return all(box.size[1:] == held.frame[1:] or not box.elements for box in held.boxes)


def _room(held: Held) -> int | None:
    """Elements that the parts, padded to the longest and one after the other, have beyond the whole.

    None where they do not begin with the whole when they are put so, or where most of it would be padding.
    """
    longest = max(box.size[0] for box in held.boxes)
    in_order = _is_ranges(held) and all(
        not box.elements or box.start[0] == number * longest for number, box in enumerate(held.boxes)
    )
    elements = math.prod(held.frame)
    room = max(box.elements for box in held.boxes) * len(held.boxes) - elements
    return room if in_order and room <= elements * (_WORTH_PADDING - 1) else None


def _view(whole: Tensor, box: Box) -> Tensor:
    return _slices(whole, box.start, box.size)


def _slices(whole: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole


def _put(block: Tensor, start: int, part: Tensor) -> None:
    taken = _bytes(part)
    block[start : start + len(taken)] = taken


def _taken(block: Tensor, start: int, dtype: torch.dtype, size: Sequence[int]) -> Tensor:
    nbytes = math.prod(size) * dtype.itemsize
    return block[start : start + nbytes].view(dtype).view(tuple(size))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
