"""Whoever reads a command's output may stop before its end (`weightlane backends | head`)."""

from __future__ import annotations

import os
import select
import sys

READER_GONE = 141
"""What a shell gives for a program that SIGPIPE ended; Python ignores the signal, which sockets need."""


class Reader:
    """The other end of standard output, as far as it is a pipe."""

    def __init__(self) -> None:
        try:
            # Of our own, since rich puts another file in the place of a broken pipe.
            self._pipe = os.dup(sys.stdout.fileno())
        except (OSError, ValueError, AttributeError):  # no file: captured, or closed
            self._pipe = -1

    def is_gone(self) -> bool:
        """Whether nobody reads any more."""
        if self._pipe < 0:
            return False
        asked = select.poll()
        asked.register(self._pipe, 0)
        return any(event & select.POLLERR for _, event in asked.poll(0))

    def settle(self, status: int, *, failed: int) -> int:
        """The exit status, after all that was printed has been written or given up.

        `failed` is the status that typer and rich give when a write fails, too.
        """
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            status = failed
        if status == failed and self.is_gone():
            status = READER_GONE
            # Else Python's own flush at exit would fail once more, and say so.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
            os.close(nowhere)
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        return status
