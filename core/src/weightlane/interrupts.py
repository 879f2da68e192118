"""Holding back signals while a child process is started and noted down.

A signal handler that raises, as Python's own for Ctrl-C does, can do so between the fork of a child and
the line that stores its process: nobody then knows of the child, and nobody ends it.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP wait until the block has ended; each that came is then delivered.

    Only handlers written in Python are held back, and only on the main thread, where alone they run. A
    signal that is ignored or ends the process at once stays as it is. Children inherit nothing of this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        arrived.append(number)

    handlers = {number: signal.getsignal(number) for number in _ENDING}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for arrival in dict.fromkeys(arrived):
            signal.raise_signal(arrival)
