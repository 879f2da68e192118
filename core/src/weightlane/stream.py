"""The export stream: planned buckets of canonical tensors, and how long each tensor stays valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from torch import Tensor


class ExportStream(Protocol):
    """Iterates the plan's buckets in order; a context manager that owns whatever makes tensors valid.

    `collective`: iterating takes part in collectives, so every rank must reach the end. `owns_storage`:
    tensors stay valid after their bucket; otherwise each is valid until the next bucket is asked for.
    A rank that only drains may yield empty buckets. Leaving the context early restores the model exactly
    once (invariant 2).
    """

    collective: bool
    owns_storage: bool
    device: str

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        """One item per planned bucket: (index into the plan's tensors, tensor) in layout order."""

    def __enter__(self) -> ExportStream:  # noqa: PYI034 - a stream may enter into another
        """Checks and enters what needs no other rank: all ranks agree to start only after this.

        Raises ExportError when the model is not what the manifest announced.
        """

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restores the model; called once, also after an exception."""
