"""One tensor of the trainer as this rank holds it: a part of it, or all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from weightlane.export.recipe import Source
    from weightlane_fsdp.boxes import Box


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, who holds which part of it, and this rank's live part.

    `part` aliases the trainer's storage: of the size of this rank's box, in the trainer's own dtype; `dtype`
    is the one it is exported in, `device` where the trainer computes with it. `boxes` are in order of rank
    and cut a tensor of shape `frame`; they are empty where every rank holds the whole. `stride` is given
    where `frame` is the storage of a tensor that is not contiguous. `tie` is equal for two names of one
    storage. `written` is what an optimizer writes to, where torch counts the writes; it does not at a part.
    `kept_equal`: nothing gathers it, yet its wrapper keeps the ranks' copies equal.
    """

    source: Source
    dtype: torch.dtype
    part: Tensor
    written: Tensor
    device: torch.device
    tie: Hashable
    boxes: tuple[Box, ...] = ()
    frame: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    kept_equal: bool = False
    is_buffer: bool = False
    owned_offload: bool = False
    """FSDP's own policy keeps it on the CPU and brings it to the GPU when it computes."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group that it is gathered in; () where nothing is to gather."""
        return tuple(box.rank for box in self.boxes)

    @property
    def state(self) -> tuple[int, int]:
        """Where its part is and how often it was written to; writes through `.data` are not counted."""
        # Tensors that were made in inference mode are not counted; they cannot be trained either.
        return self.part.data_ptr(), 0 if self.written.is_inference() else self.written._version

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, as exported."""
        return math.prod(self.source.shape) * self.dtype.itemsize
