"""A rank's line to the command that started it: a task comes in, reports go out, and its end is noticed."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

from weightlane.demo.messages import Task, line_of
from weightlane.errors import ProtocolError, SyncTimeoutError

if TYPE_CHECKING:
    from weightlane.demo.messages import RankMessage

_STANDARD_INPUT = 0
_READ_BYTES = 1 << 16

ORPHANED = 3
"""Exit status of a rank whose command is gone."""


class ParentLine:
    """Reads standard input in a thread; when it closes, the command is gone and this process ends itself.

    Args:
        report_to: file descriptor of the pipe that the command reads. Libraries print to standard output, so
            reports have a channel of their own.
    """

    def __init__(self, report_to: int) -> None:
        self._report_to = report_to
        self._tasks: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._watch, name="demo-parent", daemon=True).start()

    def task(self, *, seconds: float) -> Task:
        """The task, once it has come.

        Raises:
            SyncTimeoutError: it did not come in time.
            ProtocolError: what came is no task.
        """
        try:
            line = self._tasks.get(timeout=seconds)
        except queue.Empty:
            raise SyncTimeoutError(f"No task came within {seconds:g} s.") from None
        try:
            return msgspec.json.decode(line, type=Task)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"The task could not be read: {error}.") from error

    def tell(self, message: RankMessage) -> None:
        """Sends one report."""
        data = line_of(message)
        while data:
            data = data[os.write(self._report_to, data) :]

    def _watch(self) -> None:
        # Not through sys.stdin: its lock, held while this thread waits, is fatal when the interpreter ends.
        pending = b""
        # Bounded by the command's life, whose end closes the pipe; nobody waits for this thread.
        while data := os.read(_STANDARD_INPUT, _READ_BYTES):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._tasks.put(line)
        os._exit(ORPHANED)  # no clean-up: other threads may wait in a collective for as long as it lasts
