"""The controller's verdicts on one sync, and what a rank makes of an abort that comes beside them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from weightlane.control import CONTROLLER
from weightlane.errors import ControlLostError, WeightlaneError
from weightlane.failures import failure_of
from weightlane.starting import RANK_STEPS, STEPS

if TYPE_CHECKING:
    import msgspec

    from weightlane.control import ControlChannel

SyncPart: TypeAlias = Literal["sync", "base"]
"""`base`: the part of a sync in mode adapter that comes first, with keys and aborts of its own."""

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
        part: which part of it.
        abort: the name of its abort.
        patience: how long a rank waits for a verdict while everybody lives.
        grace: how long a rank that saw an abort waits for a verdict that may have come before it.
    """

    def __init__(
        self,
        channel: ControlChannel,
        sync: int,
        *,
        abort: str,
        patience: float,
        grace: float,
        part: SyncPart = "sync",
    ) -> None:
        self._channel = channel
        self._sync = sync
        self._part = part
        self.abort = abort
        self._patience = patience
        self._grace = grace + _VERDICT_SECONDS
        self._given: set[str] = set()

    def given(self, step: str) -> bool:
        """Whether this step is decided: its verdict was put, on the controller, or the sync's abort was told.

        Neither is taken back. May be called from another thread.
        """
        return step in self._given or self._is_aborted()

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

    def _is_aborted(self) -> bool:
        try:
            self._channel.check_abort(self.abort)
        except ControlLostError:
            return False
        except WeightlaneError:
            return True
        return False

    def _after(self, cause: WeightlaneError, step: str, kind: type[_T]) -> _T:
        try:
            return self._channel.get(self._key(step), kind, seconds=self._grace, awaited=(CONTROLLER,))
        except WeightlaneError as verdict:
            raise cause from verdict

    def forget_before(self) -> None:
        """On the controller: deletes the keys of the syncs before the last, where nobody waits for them now.

        A sync that the controller gives up at its start may be over here before another rank has left the one
        before it. So every rank must have come to the last; what has to stay goes with a later sync.
        """
        ranks = range(self._channel.world_size)
        part = self._part
        if not self._channel.has(*(f"{part}/{self._sync - 1}/start/{rank}" for rank in ranks)):
            return
        sync = self._sync - 2
        while sync > 0 and self._channel.has(f"{part}/{sync}/start/{CONTROLLER}"):
            self._channel.forget(
                *(f"{part}/{sync}/{step}" for step in _ONCE),
                *(f"{part}/{sync}/{step}/{rank}" for step in _BY_EACH_RANK for rank in ranks),
                *(f"abort/{half}-{sync}{what}" for half in (part, "commit") for what in ("", "/first")),
            )
            sync -= 1

    def _key(self, step: str) -> str:
        return f"{self._part}/{self._sync}/{step}"
