"""What a placement table says that one receiver tensor holds after a load of known values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightlane.packing import torch_dtype
from weightlane.trace.geometry import extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.trace.table import Fill, Placement, TracedSource, TracedTarget

_NOTHING = -1


class ExpectedElements:
    """Begins with what `target` held before the load; fills and placements are then laid over it in order."""

    def __init__(self, target: TracedTarget, before: Tensor) -> None:
        self._target = target
        reach = extent(target.shape, target.stride)
        self._values = torch.zeros(reach, dtype=before.dtype, device=before.device)
        self._seen(self._values).copy_(before)
        self._claims = torch.full((reach,), _NOTHING, dtype=torch.int32)
        self._items: list[Fill | Placement] = []

    def fill(self, item: Fill) -> None:
        """A constant."""
        sizes, steps = [axis[0] for axis in item.axes], [axis[1] for axis in item.axes]
        self._values.as_strided(sizes, steps, item.offset).fill_(item.value)
        self._claim(item, sizes, steps, item.offset)

    def place(self, item: Placement, source: Tensor) -> None:
        """Elements of `source` (flat, in its own dtype), through the placement's casts."""
        sizes, steps = [axis[0] for axis in item.axes], [axis[2] for axis in item.axes]
        taken = source.as_strided(sizes, [axis[1] for axis in item.axes], item.source_offset)
        for name in item.casts:
            taken = taken.to(torch_dtype(name))
        self._values.as_strided(sizes, steps, item.target_offset).copy_(taken)
        self._claim(item, sizes, steps, item.target_offset)

    def wrong(self, held: Tensor, *, unclaimed: bool) -> Tensor:
        """Which elements of the target differ from it; `unclaimed`: also those that the table leaves out."""
        expected, found = _comparable(self._seen(self._values)), _comparable(held)
        differing = (expected != found).cpu()
        return differing if unclaimed else differing & (self._seen(self._claims) != _NOTHING)

    def explain(self, wrong: Tensor, held: Tensor, sources: Sequence[TracedSource]) -> str:
        """The first wrong element, in words."""
        place = tuple(int(index) for index in torch.nonzero(wrong)[0])
        claim = int(self._seen(self._claims)[place])
        said = "the table says that nothing is written there"
        if claim != _NOTHING:
            item = self._items[claim]
            said = "the table says that it is filled"
            if hasattr(item, "source"):
                said = f"the table places {sources[item.source].canonical} there"
        expected = self._seen(self._values)[place].item()
        return f"element {list(place)}: {said} (value {expected}); it is {held[place].item()}"

    def _claim(self, item: Fill | Placement, sizes: list[int], steps: list[int], offset: int) -> None:
        self._claims.as_strided(sizes, steps, offset).fill_(len(self._items))
        self._items.append(item)

    def _seen(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self._target.shape, self._target.stride)


def _comparable(tensor: Tensor) -> Tensor:
    """Plain, and of a dtype that can be compared: not every one of eight bits can."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    return plain.float() if plain.is_floating_point() and plain.dtype.itemsize == 1 else plain
