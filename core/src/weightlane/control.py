"""The control channel: small typed messages between controller and trainer ranks, beside all collectives.

A `TCPStore` that the controller opens on loopback (or on the address the user names). It still speaks when
a collective is stuck: every wait on it watches for an abort and for the silence of whoever must answer.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from weightlane.bounded_calls import BoundedCalls
from weightlane.errors import ControlLostError, SyncTimeoutError
from weightlane.failures import Failure, error_of, failure_of
from weightlane.messages import decode, encode
from weightlane.waiting import Liveness, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import TCPStore

_T = TypeVar("_T")
_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_TELL_SECONDS = 2.0
CONTROLLER = 0


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch's go on with a C++ stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class RankPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank runs, for messages about it."""

    rank: int
    host: str
    process_id: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process_id} on {self.host})"


class ControlChannel:
    """One rank's end of the channel.

    Args:
        store: this rank's client (the controller's also holds the server).
        beat_store: a second client, for the thread that beats.
        lane: prefix of every key.
        lost_after: seconds of silence after which a rank, or the store's server, counts as dead.
    """

    def __init__(
        self,
        store: TCPStore,
        beat_store: TCPStore,
        *,
        lane: str,
        rank: int,
        world_size: int,
        lost_after: float,
    ) -> None:
        self._store = store
        self._calls = BoundedCalls("weightlane-control", lost_after)
        self._beat_store = beat_store
        self._lane = lane
        self.rank = rank
        self.world_size = world_size
        self._lost_after = lost_after
        self._on_beat: list[Callable[[], None]] = []
        # Bounded by the callbacks, which write a word of shared memory each.
        self._beating = threading.Lock()
        self._stop = threading.Event()
        self._liveness: dict[int, Liveness] = {}
        self._next_look: dict[int, float] = {}
        self._places: dict[int, RankPlace] = {}
        self._thread = threading.Thread(target=self._beat, name="weightlane-beat", daemon=True)
        self._thread.start()

    # -- messages ---------------------------------------------------------------------------------------

    def put(self, key: str, message: msgspec.Struct) -> None:
        """Sets a key, for everyone."""
        self._set(self._key(key), message)

    def get(self, key: str, kind: type[_T], *, seconds: float, awaited: Sequence[int], abort: str = "") -> _T:
        """Waits for a key.

        Args:
            key: what to wait for.
            kind: the message type; a `Failure` in its place is raised as the error it carries.
            seconds: the bound.
            awaited: the ranks whose silence ends the wait.
            abort: name of an abort whose appearance ends the wait with its cause.

        Raises:
            ControlLostError: an awaited rank, or the channel, is silent or gone.
            SyncTimeoutError: the bound was reached while everyone lives.
            WeightlaneError: the failure found in place of the message, or the abort's cause.
        """
        full = self._key(key)

        def check() -> None:
            if abort:
                self.check_abort(abort)
            self.check_alive(awaited)

        def there() -> bool:
            return bool(self._call(lambda: self._store.check([full])))

        if not wait_until(there, seconds=seconds, check=check):
            ranks = ", ".join(str(rank) for rank in awaited)
            raise SyncTimeoutError(
                f"Waited {seconds:g} s for '{key}' from rank {ranks} on the control channel.",
                "That rank lives but has not come to this point.",
                "Every trainer rank must make the same weightlane calls in the same order.",
            )
        data = self._call(lambda: self._store.get(full))
        message: _T | Failure = decode(data, kind | Failure, sender=f"control channel key {key}")
        if isinstance(message, Failure):
            raise error_of(message)
        return message

    def gather(self, key: str, kind: type[_T], *, seconds: float, abort: str = "") -> list[_T]:
        """On the controller: `get` of every rank's `key`/rank, in rank order, all within `seconds`."""
        everyone = range(self.world_size)
        deadline = time.monotonic() + seconds
        return [
            self.get(
                f"{key}/{rank}",
                kind,
                seconds=max(0.0, deadline - time.monotonic()),
                awaited=everyone,
                abort=abort,
            )
            for rank in everyone
        ]

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are there now."""
        full = [self._key(key) for key in keys]
        return bool(self._call(lambda: self._store.check(full)))

    def forget(self, *keys: str) -> None:
        """On the controller: deletes keys that nobody waits for any more."""
        for key in keys:
            self._call(partial(self._store.delete_key, self._key(key)))

    # -- aborts and liveness ------------------------------------------------------------------------------

    def abort(self, name: str, error: BaseException) -> None:
        """Tells everyone that `name` failed; the first cause stays, later ones are not recorded."""
        failure = failure_of(error, origin=f"rank {self.rank}")
        key = self._key(f"abort/{name}")
        try:
            if self._call(lambda: self._store.add(f"{key}/first", 1)) == 1:
                self._set(key, failure)
            else:
                # Whoever was first is about to tell the cause, and this rank is to raise that one.
                wait_until(lambda: self._call(lambda: self._store.check([key])), seconds=_TELL_SECONDS)
        except ControlLostError:
            # Nobody can be told any more; the caller raises its own error.
            return

    def check_abort(self, name: str) -> None:
        """Raises the cause when `name` was aborted by any rank."""
        key = self._key(f"abort/{name}")
        if self._call(lambda: self._store.check([key])):
            failure: Failure = decode(self._call(lambda: self._store.get(key)), Failure, sender="an abort")
            raise error_of(failure)

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raises ControlLostError naming the first of `ranks` that has beaten once and is silent now."""
        for rank in ranks:
            if rank == self.rank or time.monotonic() < self._next_look.get(rank, 0.0):
                continue
            self._next_look[rank] = time.monotonic() + _LOOK_SECONDS
            liveness = self._liveness.get(rank)
            if liveness is None:
                if self._beats_of(rank) == 0:
                    continue  # has not called connect yet; the bound of the wait itself ends that
                liveness = self._liveness[rank] = Liveness(partial(self._beats_of, rank))
            if liveness.silent_seconds() > self._lost_after:
                place = self._places.get(rank)
                raise ControlLostError(
                    f"{str(place).capitalize() if place else f'Rank {rank}'} has been silent for "
                    f"{self._lost_after:g} s.",
                    "The process died or hangs.",
                    "See that rank's log; start the job again.",
                )

    def know_places(self, places: Sequence[RankPlace]) -> None:
        """Remembers where ranks run, so that errors about them can say it."""
        self._places = {place.rank: place for place in places}

    def on_beat(self, callback: Callable[[], None]) -> None:
        """Also calls `callback` at every beat (about once a second), from the beating thread."""
        with self._beating:
            self._on_beat.append(callback)

    def off_beat(self, callback: Callable[[], None]) -> None:
        """Stops calling `callback`; no call of it is running when this returns."""
        with self._beating:
            # By equality: a bound method is another object each time it is looked up.
            self._on_beat = [other for other in self._on_beat if other != callback]

    def close(self, *, seconds: float = 5.0) -> None:
        """Stops beating and lets go of the store; the controller lingers `seconds` at most for the others."""
        if self._stop.is_set():
            return
        try:
            closed = self._key("closed")
            self._call(lambda: self._store.add(closed, 1))
            if self.rank == CONTROLLER:
                wait_until(
                    lambda: self._call(lambda: self._store.add(closed, 0)) >= self.world_size, seconds=seconds
                )
        except ControlLostError:
            # The server went first; there is nothing left to close.
            pass
        finally:
            self._stop.set()
            self._calls.close()
            self._thread.join(timeout=2 * _BEAT_SECONDS)
            # The server ends with its last reference, and its port may be wanted again.
            del self._store, self._beat_store

    # -- inside -----------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._lane}/{key}"

    def _set(self, full_key: str, message: msgspec.Struct) -> None:
        data = encode(message)
        # The stub says str; the binding takes bytes as they are.
        self._call(lambda: self._store.set(full_key, data))  # type: ignore[arg-type]

    def _beats_of(self, rank: int) -> int:
        return self._call(lambda: self._store.add(self._key(f"beat/{rank}"), 0))

    def _call(self, operation: Callable[[], _T]) -> _T:
        try:
            return self._calls.run(operation)
        except (RuntimeError, TimeoutError) as error:
            place = self._places.get(CONTROLLER)
            raise ControlLostError(
                f"The control channel of lane {self._lane} is gone.",
                f"The controller, {place or 'rank 0'}, ended, hangs or cannot be reached "
                f"({first_line(error)}).",
                "See that rank's log; start the job again.",
            ) from error

    def _beat(self) -> None:
        key = self._key(f"beat/{self.rank}")
        while not self._stop.is_set():
            with self._beating:
                for callback in self._on_beat:
                    callback()
            try:
                # May block without end when the server is stopped. Bounded by nobody's waiting for it: the
                # thread is a daemon, and `close` joins it for two beats at most.
                self._beat_store.add(key, 1)
            except RuntimeError:
                # The main thread meets the same loss, with an error; rings must go on beating until then.
                self._stop.wait(_BEAT_SECONDS)
                continue
            self._stop.wait(_BEAT_SECONDS)
