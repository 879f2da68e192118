"""Processes that stop and do not die."""

from __future__ import annotations

import os
import signal


class Hang:
    """SIGSTOP and SIGCONT of one process."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id

    def begin(self) -> None:
        os.kill(self._process_id, signal.SIGSTOP)

    def end(self) -> None:
        os.kill(self._process_id, signal.SIGCONT)
