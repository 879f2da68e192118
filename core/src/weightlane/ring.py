"""A ring of bucket slots in shared memory between one trainer rank and one engine worker.

One file, private to the user (mode 0600), mapped by both. A 4 KiB header holds the state as 64-bit words,
each written by one side only; slots follow. The sender waits until the receiver reads this sync and has
released the slot's last bucket, packs, posts; the receiver waits for the post, loads, drops its views,
releases. Posts, releases and failures carry the number of their sync, so that what an earlier, failed sync
left behind is never mistaken for this one's. Both sides beat, so that either notices a dead or stuck peer,
and either can leave a cause of failure for the other to read.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.buckets import MOST_SLOTS
from weightlane.errors import ProtocolError, SyncError, SyncTimeoutError
from weightlane.ring_file import create_private_file, map_private_file
from weightlane.ring_memory import (
    FIRST_SLOT_WORD,
    HEADER_BYTES,
    RECEIVER_TEXT,
    SENDER_TEXT,
    Ring,
    named,
    serial_of,
)
from weightlane.waiting import Liveness, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout

__all__ = ["Ring", "RingReader", "RingWriter"]

_MAGIC = 0x57_4C_52_49_4E_47_01
_SENDER_SYNC, _SENDER_BEAT, _RECEIVER_BEAT, _SENDER_FAILED, _RECEIVER_FAILED = 1, 2, 3, 4, 5
_SENDER_PID, _RECEIVER_PID, _RECEIVER_SYNC, _RECEIVER_CLOSED = 6, 7, 8, 9


class RingWriter(Ring):
    """The trainer rank's end; creates the file and removes it at `close`."""

    def __init__(self, *, label: str, slot_sizes: Sequence[int], peer: str) -> None:
        if not 1 <= len(slot_sizes) <= MOST_SLOTS:
            raise ValueError(f"a ring has 1 to {MOST_SLOTS} slots, not {len(slot_sizes)}")
        super().__init__(create_private_file(label, HEADER_BYTES + sum(slot_sizes)), slot_sizes)
        self.peer = peer
        self._set_word(_SENDER_PID, os.getpid())
        self._set_word(0, _MAGIC)
        self._receiver = Liveness(lambda: self._word(_RECEIVER_BEAT))
        self._in_flight: dict[int, int] = {}

    def begin(self, sync: int) -> None:
        """Opens a sync; their numbers grow from 1. Slots that a failed sync never got back count as free."""
        self._in_flight.clear()
        self._set_word(_SENDER_SYNC, sync)
        self._receiver.restart()

    def beat(self) -> None:
        """Shows the receiver that this process lives."""
        self._beat(_SENDER_BEAT)

    def acquire(
        self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float, check: Callable[[], None]
    ) -> Tensor:
        """The bucket's slot as a uint8 tensor, once the receiver reads this sync and has the slot free."""
        self.wait_free(layout, sync=sync, seconds=seconds, lost_after=lost_after, check=check)
        return self.slot_tensor(layout)

    def wait_free(
        self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float, check: Callable[[], None]
    ) -> None:
        """Waits as `acquire` does, for a slot whose bytes lie elsewhere than in the ring."""

        def free() -> bool:
            # A receiver that is not yet in this sync may still be loading from a failed one's slots.
            return self._word(_RECEIVER_SYNC) == sync and self._is_back(layout.slot)

        self._wait(free, f"a free slot for bucket {layout.index}", sync, seconds, lost_after, check)

    def post(self, layout: BucketLayout, *, sync: int) -> None:
        """Hands the packed bucket over."""
        serial = self._in_flight[layout.slot] = serial_of(sync, layout.index)
        self._set_word(FIRST_SLOT_WORD + 2 * layout.slot, serial)

    def drain(self, *, sync: int, seconds: float, lost_after: float, check: Callable[[], None]) -> None:
        """Waits until the receiver has released every slot."""

        def drained() -> bool:
            return all(self._is_back(slot) for slot in self._in_flight)

        self._wait(drained, "the last bucket's release", sync, seconds, lost_after, check)

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Tells the receiver to stop waiting for `sync` (default: the one last begun here), and why."""
        if self._closed:
            return
        # Whoever aborts has an error of its own to tell, and the reader of a file that was cut tells that.
        with contextlib.suppress(ProtocolError):
            self._write_text(SENDER_TEXT, cause)
            self._set_word(_SENDER_FAILED, self._words[_SENDER_SYNC] if sync is None else sync)

    def hide(self) -> None:
        """Removes the file's name, once the reader has it mapped: then a killed trainer leaves nothing, and
        nobody else can open, change or cut it."""
        self.path.unlink(missing_ok=True)

    def wait_detached(self, seconds: float) -> bool:
        """Whether the receiver has let go of what it mapped, or is gone; waits for it at most `seconds`."""
        if self._closed:
            return True
        with contextlib.suppress(ProtocolError):  # of a file that was cut nothing can be known
            return wait_until(self._is_detached, seconds=seconds)
        return False

    def _is_detached(self) -> bool:
        receiver = self._word(_RECEIVER_PID)
        return not receiver or bool(self._word(_RECEIVER_CLOSED)) or not _lives(receiver)

    def close(self) -> None:
        """Removes the file and unmaps; idempotent."""
        self.hide()
        super().close()

    def _is_back(self, slot: int) -> bool:
        if slot not in self._in_flight:
            return True
        released = self._released(slot)
        if released > self._in_flight[slot] or released < 0:
            raise ProtocolError(
                f"{self.peer} released {named(released)} from a slot that held "
                f"{named(self._in_flight[slot])}.",
                "Somebody else writes to this ring, or the worker's agent is broken.",
                "Connect again.",
            )
        return released == self._in_flight[slot]

    def _wait(
        self,
        condition: Callable[[], bool],
        what: str,
        sync: int,
        seconds: float,
        lost_after: float,
        check: Callable[[], None],
    ) -> None:
        def checked() -> None:
            check()
            if self._word(_RECEIVER_FAILED) == sync:
                raise SyncError(
                    f"{self.peer} refused or failed sync {sync} while this rank waited for {what}.",
                    self._read_text(RECEIVER_TEXT),
                )
            if self._word(_RECEIVER_SYNC) != sync:
                self._receiver.restart()
            elif self._receiver.silent_seconds() > lost_after:
                raise SyncTimeoutError(
                    f"{self.peer} (process {self._words[_RECEIVER_PID]}) has been silent for "
                    f"{lost_after:g} s while this rank waited for {what} of sync {sync}.",
                    "The process died or hangs.",
                    "See the engine's log; start it again at its address: the next sync takes it back.",
                )

        if not wait_until(condition, seconds=seconds, check=checked):
            raise SyncTimeoutError(
                f"Waited {seconds:g} s for {what} of sync {sync} from {self.peer}.",
                "The receiver lives but does not move on.",
                "Raise the lane's wait bound if its loader is that slow.",
            )


class RingReader(Ring):
    """The worker's end."""

    def __init__(self, path: str, slot_sizes: Sequence[int]) -> None:
        super().__init__(map_private_file(Path(path), HEADER_BYTES + sum(slot_sizes)), slot_sizes)
        if self._word(0) != _MAGIC:
            self.close()
            raise ProtocolError(
                f"{path} is not a ring of this weightlane version.", "Its first word differs."
            )
        self._set_word(_RECEIVER_PID, os.getpid())
        self._sender = Liveness(lambda: self._word(_SENDER_BEAT))

    def begin(self, sync: int) -> None:
        """Shows the sender that this worker reads sync `sync`."""
        self._sender.restart()
        self.beat()
        self._set_word(_RECEIVER_SYNC, sync)

    def beat(self) -> None:
        """Shows the sender that this process lives."""
        self._beat(_RECEIVER_BEAT)

    def take(
        self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float
    ) -> tuple[Tensor, memoryview, float]:
        """Waits for the bucket; gives its bytes as tensor and memory, and the seconds waited."""
        waited = self.wait_posted(layout, sync=sync, seconds=seconds, lost_after=lost_after)
        return self.slot_tensor(layout), self.slot_memory(layout), waited

    def wait_posted(self, layout: BucketLayout, *, sync: int, seconds: float, lost_after: float) -> float:
        """Waits as `take` does, for a bucket whose bytes lie elsewhere than in the ring."""
        started = time.monotonic()
        wanted = serial_of(sync, layout.index)
        what = f"bucket {layout.index} of sync {sync}"

        def check() -> None:
            posted = self._posted(layout.slot)
            if self._word(_SENDER_FAILED) == sync:
                raise SyncError(
                    f"The trainer gave up while this worker waited for {what}.", self._read_text(SENDER_TEXT)
                )
            if self._word(_SENDER_SYNC) > sync:
                raise SyncError(
                    f"The trainer went on to sync {self._word(_SENDER_SYNC)} while this worker waited for "
                    f"{what}.",
                    "That sync had failed elsewhere.",
                )
            if posted > wanted or posted < 0:
                raise ProtocolError(
                    f"The ring holds {named(posted)} where {what} was due.",
                    "A bucket was skipped, somebody else writes to this ring, or the trainer is broken.",
                    "Connect again.",
                )
            if self._sender.silent_seconds() > lost_after:
                raise SyncTimeoutError(
                    f"The trainer rank (process {self._words[_SENDER_PID]}) has been silent for "
                    f"{lost_after:g} s while this worker waited for {what}.",
                    "The process died or hangs.",
                )

        if not wait_until(lambda: self._posted(layout.slot) == wanted, seconds=seconds, check=check):
            raise SyncTimeoutError(
                f"Waited {seconds:g} s for {what}.", "The trainer lives but sends nothing."
            )
        return time.monotonic() - started

    def release(self, layout: BucketLayout, *, sync: int) -> None:
        """Gives the slot back; every view of it must be gone."""
        self._set_word(FIRST_SLOT_WORD + 2 * layout.slot + 1, serial_of(sync, layout.index))

    def is_abandoned(self) -> bool:
        """Whether the sender has closed its end or its process is gone."""
        return self._file.is_abandoned()

    def fail(self, cause: str) -> None:
        """Tells the sender that this worker stopped reading its current sync, and why."""
        # The error itself also goes back by the message that is being answered.
        with contextlib.suppress(ProtocolError):
            self._write_text(RECEIVER_TEXT, cause)
            self._set_word(_RECEIVER_FAILED, self._words[_RECEIVER_SYNC])

    def close(self) -> None:
        """Tells the sender that nothing of it is mapped here any more, and unmaps; idempotent."""
        if not self._closed:
            with contextlib.suppress(ProtocolError):
                self._set_word(_RECEIVER_CLOSED, 1)
        super().close()


def _lives(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)  # signal 0 is sent to nobody: it only asks
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
