"""A reader's beats while it is busy loading."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.incoming import IncomingRing

_BEAT_SECONDS = 0.5


@contextmanager
def beating(ring: IncomingRing) -> Iterator[None]:
    """Beats from a thread, since one bucket's load can outlast the sender's patience."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_BEAT_SECONDS):
            ring.beat()

    thread = threading.Thread(target=beat, name="weightlane-ring-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()  # bounded by one beat: what it does never waits
