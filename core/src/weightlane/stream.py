"""The export stream: planned buckets of canonical tensors, how long each is valid, what is loaded for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

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


@runtime_checkable
class MovesMemory(Protocol):
    """A stream of a backend whose `TrainerLifecycle` loads or offloads; called inside the stream's context.

    No collective: a rank whose `onload` fails is known to all before the first bucket is asked for.
    """

    def onload(self) -> None:
        """Brings what the export needs to where it is needed; every engine has paused and made room."""

    def offload(self) -> None:
        """Undoes `onload`, after the last bucket and before any engine takes memory back.

        Called once for each `onload` that was begun, also when it, or the move, failed.
        """


@runtime_checkable
class TellsRounding(Protocol):
    """A stream that merges adapters, and tells what rounding to the weights' dtype took from their change."""

    @property
    def update_lost(self) -> float | None:
        """The lost share of what was made so far, from 0 to 1; None where nothing was merged."""
