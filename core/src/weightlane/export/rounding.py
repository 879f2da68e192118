"""How much of what adapters add is lost when a merged weight is rounded to its own dtype.

bfloat16 keeps eight bits: a change below a 256th of a weight can vanish from it. An adapter that is sent by
itself loses nothing of this kind.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class RoundingLoss:
    """Adds up, over merged tensors, the change that was meant and the part of it that did not arrive."""

    def __init__(self) -> None:
        self._meant = 0.0
        self._lost = 0.0
        self.tensors = 0

    @property
    def update_lost(self) -> float | None:
        """The lost part as a share of the whole change, both as root sums of squares; None before any."""
        if not self.tensors:
            return None
        return (self._lost / self._meant) ** 0.5 if self._meant else 0.0

    def add(self, base: Tensor, exact: Tensor, sent: Tensor) -> None:
        """One tensor: before the merge, merged without rounding, and as it is sent."""
        self.tensors += 1
        self._meant += _squares(exact - base)
        if sent.dtype != exact.dtype:
            self._lost += _squares(exact - sent.to(exact.dtype))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is merged in this block, by this thread, is added."""
        token = _MEASURING.set(self)
        try:
            yield
        finally:
            _MEASURING.reset(token)


def note_merge(base: Tensor, exact: Tensor, sent: Tensor) -> None:
    """Called by every merge; costs nothing where nobody measures."""
    measuring = _MEASURING.get()  # bounded by itself: a variable of this thread, no wait
    if measuring is not None:
        measuring.add(base, exact, sent)


def _squares(tensor: Tensor) -> float:
    import torch

    return float(torch.linalg.vector_norm(tensor.double())) ** 2


_MEASURING: ContextVar[RoundingLoss | None] = ContextVar("weightlane_measuring", default=None)
