"""Tensors that a loader made full of one number: what `target[4:] = 0` or a copy of `zeros` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightlane.trace.recorder import storage_key
from weightlane.trace.stand_ins import aten

if TYPE_CHECKING:
    from torch import Tensor

# Where the number is among the arguments, or the number itself.
_GIVEN = {
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
}
_FIXED = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}


class Constants:
    """By the memory that they lie in, which the recorder keeps from being another's later."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[float, torch.dtype]] = {}

    def note(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], made: Tensor) -> None:
        """Remembers `made` if the operator makes constants."""
        place = _GIVEN.get(operator)
        value = _FIXED.get(operator) if place is None else args[place]
        if isinstance(value, (bool, int, float)):
            self._values[storage_key(made)] = (float(value), made.dtype)

    def forget(self, changed: Tensor) -> None:
        """It has been written to."""
        self._values.pop(storage_key(changed), None)

    def of(self, tensor: object) -> tuple[float, torch.dtype] | None:
        """The number that fills a tensor or a view of it, before it is rounded to the dtype that it has."""
        if not self._values or not isinstance(tensor, torch.Tensor):
            return None
        known = self._values.get(storage_key(tensor))
        if known is None or known[1] != tensor.dtype:  # seen as another dtype: another number
            return None
        return known if tensor.is_meta or _holds(tensor, known[0]) else None


def _holds(tensor: Tensor, value: float) -> bool:
    """Whether it does still: the array that `numpy()` gives is written to past torch."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64  # torch compares no float8
    constant = torch.full((), value, dtype=tensor.dtype).to(wide)
    seen = tensor.detach().cpu().to(wide)
    return bool((seen.isnan() if constant.isnan() else seen == constant).all())
