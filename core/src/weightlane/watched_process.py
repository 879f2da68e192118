"""Watching the processes of an engine, so that no call waits for one that is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass, field


@dataclass(slots=True)
class WatchedProcess:
    """One process by pid, held so that a reused pid is never taken for it.

    A process file descriptor where the system has them; else the pid itself is probed.
    """

    pid: int
    what: str
    _descriptor: int = field(default=-1, repr=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._ended = True
        except (AttributeError, OSError):
            self._descriptor = -1

    @property
    def ended(self) -> bool:
        """Whether it has exited, also when nobody has reaped it yet."""
        if self._ended:
            return True
        if self._descriptor >= 0:
            poller = select.poll()
            poller.register(self._descriptor, select.POLLIN)
            self._ended = bool(poller.poll(0))
        else:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._ended = True
        return self._ended

    def kill(self) -> None:
        """Ends it now; only where it is held by descriptor, so that it cannot be another process."""
        if self._descriptor >= 0 and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def first_ended(processes: tuple[WatchedProcess, ...]) -> WatchedProcess | None:
    """The first of `processes` that has ended, None while all live."""
    return next((process for process in processes if process.ended), None)
