"""Whether the trainer changed tensors while they were exported: a torn version is refused, never sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class Unchanged:
    """Remembers each tensor's place and torch's own count of writes to it.

    Writes through `.data` are not counted by torch and are not seen.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._before = {key: _state(tensor) for key, tensor in tensors.items()}

    def require(self, tensors: Mapping[str, Tensor], keys: Iterable[str]) -> None:
        """Raises ExportError when one of them was written, moved, freed, or replaced by another tensor."""
        for key in keys:
            now = _state(tensors[key]) if key in tensors else (0, 0)
            before = self._before.get(key, (0, 0))
            if now[0] != before[0]:
                raise moved(key)
            if now != before:
                raise ExportError(
                    f"{key} was changed while its version was exported.",
                    "Some buckets would hold the weights before a training step and some those after it.",
                    "Train after the sync has returned, and sync again.",
                )


def moved(key: str) -> ExportError:
    """What to raise where the memory of a tensor is another than when the export began."""
    return ExportError(
        f"{key} was moved, freed or replaced while its version was exported.",
        "What was not sent by then would come from memory that its owner frees, or writes to again.",
        "Offload or move the trainer after the sync has returned, and sync again.",
    )


def _state(tensor: Tensor) -> tuple[int, int]:
    # Tensors that were made in inference mode are not counted; they cannot be trained either.
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
