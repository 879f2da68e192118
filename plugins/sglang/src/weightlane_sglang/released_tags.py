"""What the scheduler that runs our loader has released, from the object of SGLang's that called it.

The tags lie on whatever runs releases: the scheduler until 0.5.15 or so, a part of it since. Nothing hands it
to a loader, but each request of weights passes through it, so that it is among the callers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_TAGS = "offload_tags"


def released_tags() -> tuple[str, ...] | None:
    """Sorted; None where no caller keeps such tags."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        tags = getattr(frame.f_locals.get("self"), _TAGS, None)
        if isinstance(tags, set):
            return tuple(sorted(str(tag) for tag in tags))
        frame = frame.f_back
    return None
