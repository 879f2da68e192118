"""The controller's verdicts on one sync, and what a rank makes of an abort that comes beside them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from weightlane.control import CONTROLLER
from weightlane.errors import ControlLostError, WeightlaneError
from weightlane.failures import failure_of
from weightlane.starting import RANK_STEPS, STEPS

if TYPE_CHECKING:
    import msgspec

    from weightlane.control import ControlChannel

_VERDICT_SECONDS = 2.0
_FINAL = ("staged", "committed")
_ONCE = (*STEPS, "loaded", *_FINAL)
_BY_EACH_RANK = (*RANK_STEPS, "onload", "moved")
_T = TypeVar("_T")


class SyncVerdicts:
    """One rank's view of the verdicts of sync `sync`.

    Args:
        channel: this rank's end of the control channel.
        sync: the sync's number.
        abort: the name of its abort.
        patience: how long a rank waits for a verdict while everybody lives.
        grace: how long a rank that saw an abort waits for a verdict that may have come before it.
    """

    def __init__(
        self, channel: ControlChannel, sync: int, *, abort: str, patience: float, grace: float
    ) -> None:
        self._channel = channel
        self._sync = sync
        self.abort = abort
        self._patience = patience
        self._grace = grace + _VERDICT_SECONDS
        self._given: set[str] = set()

    def given(self, step: str) -> bool:
        """On the controller: whether this verdict was put, and is not to be taken back."""
        return step in self._given

    def put(self, step: str, verdict: msgspec.Struct) -> None:
        """On the controller: the verdict, for everyone, once."""
        self._given.add(step)
        self._channel.put(self._key(step), verdict)

    def refuse(self, error: BaseException) -> None:
        """On the controller: whoever waits for a verdict that was not given gets the error instead."""
        failure = failure_of(error, origin=f"rank {self._channel.rank}")
        with contextlib.suppress(ControlLostError):
            for step in _FINAL:
                if step not in self._given:
                    self._channel.put(self._key(step), failure)

    def get(self, step: str, kind: type[_T]) -> _T:
        """The verdict, which may take as long as all that the controller waits for.

        An abort ends the wait, unless the verdict had been given before: then the verdict counts, so that no
        rank takes for failed what the others take for done.
        """
        try:
            return self._channel.get(
                self._key(step), kind, seconds=self._patience, awaited=(CONTROLLER,), abort=self.abort
            )
        except ControlLostError:
            raise
        except WeightlaneError as cause:
            if self._channel.rank == CONTROLLER:
                raise
            return self._after(cause, step, kind)

    def _after(self, cause: WeightlaneError, step: str, kind: type[_T]) -> _T:
        try:
            return self._channel.get(self._key(step), kind, seconds=self._grace, awaited=(CONTROLLER,))
        except WeightlaneError as verdict:
            raise cause from verdict

    def forget_before(self) -> None:
        """On the controller: deletes the keys of the sync before the last; nobody waits for them any more."""
        sync = self._sync - 2
        if sync > 0:
            self._channel.forget(
                *(f"sync/{sync}/{step}" for step in _ONCE),
                *(
                    f"sync/{sync}/{step}/{rank}"
                    for step in _BY_EACH_RANK
                    for rank in range(self._channel.world_size)
                ),
                *(f"abort/{half}-{sync}{what}" for half in ("sync", "commit") for what in ("", "/first")),
            )

    def _key(self, step: str) -> str:
        return f"sync/{self._sync}/{step}"
