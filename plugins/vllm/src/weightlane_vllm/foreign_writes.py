"""Weights of one worker that somebody else writes: what a lane knew of them is then no longer so.

vLLM has calls of its own that write them: `reload_weights` reads the checkpoint again, `update_weights` takes
them from any backend of its weight transfer. Neither makes the model anew, so that its incarnation stays. An
adapter would be put on a base that it was not trained on, and nothing would tell.

The wrappers are put on the worker object itself, as `sleep_watch` does. To be removed when vLLM counts the
writes to its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WRITERS = ("reload_weights", "update_weights")
"""Methods of vLLM's worker that write weights, whichever of them this version has."""

_ATTRIBUTE = "_weightlane_foreign_writes"


class ForeignWrites:
    """Watches one worker; asked from the worker's own thread.

    Args:
        worker: vLLM's own worker object.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._written_by = ""
        self._wrapped: list[str] = []

    def apply(self) -> None:
        """Notes each such call from now on, also one that fails half-way. A second call changes nothing."""
        if self._wrapped:
            return
        for name in WRITERS:
            theirs = getattr(self._worker, name, None)
            if theirs is not None:
                setattr(self._worker, name, self._noting(name, theirs))
                self._wrapped.append(name)

    def undo(self) -> None:
        """Puts back the worker's own methods. A second call changes nothing."""
        for name in self._wrapped:
            delattr(self._worker, name)  # the class's own shows again
        self._wrapped = []

    def why_unknown(self) -> str:
        """Why nobody knows which version the weights are; "" while they are what a lane wrote."""
        if not self._written_by:
            return ""
        return f"{self._written_by} of vLLM has written its weights, and no full sync since."

    def rewritten(self) -> None:
        """A full sync has written every tensor of the checkpoint."""
        self._written_by = ""

    def _noting(self, name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any, **named: Any) -> Any:
            self._written_by = name
            return theirs(*arguments, **named)

        return written


def foreign_writes_of(worker: Any) -> ForeignWrites:
    """The one watch of a worker."""
    watch: ForeignWrites | None = vars(worker).get(_ATTRIBUTE)
    if watch is None:
        watch = ForeignWrites(worker)
        watch.apply()
        setattr(worker, _ATTRIBUTE, watch)
    return watch
