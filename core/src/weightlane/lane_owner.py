"""Which process holds a lane, and whether it is gone: what tells a killed trainer from a quiet one.

A ring tells it by its lock. Lanes by value, by reference or over a folder leave nothing on a worker that a
killed trainer would let go of, so the plan names the controller's process. Only a worker of the same host and
process namespace can look; anywhere else the process counts as living.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _START_TIME = 0, 19
"""Places in /proc/<pid>/stat after the command's name (proc(5) counts them as fields 3 and 22)."""

_ENDED = ("Z", "X")


class LaneOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, told apart from any other that had or will have its number.

    `host` is the kernel's boot id, `namespace` that of process numbers, `started` the start in clock ticks
    after boot.
    """

    host: str
    namespace: str
    process_id: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int


def this_process() -> LaneOwner | None:
    """The calling process; None where the system does not tell."""
    place = _place()
    seen = _look(os.getpid())
    return LaneOwner(*place, os.getpid(), seen[1]) if place and seen else None


def is_gone(owner: LaneOwner | None) -> bool:
    """Whether that process has certainly ended; False wherever this cannot be known."""
    if owner is None or (owner.host, owner.namespace) != _place():
        return False
    try:
        os.kill(owner.process_id, 0)  # signal 0 is sent to nobody: it only asks
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    seen = _look(owner.process_id)
    return seen is not None and (seen[0] in _ENDED or seen[1] != owner.started)


@cache
def _place() -> tuple[str, str] | None:
    try:
        return _BOOT_ID.read_text("ascii").strip(), str(_NAMESPACE.readlink())
    except OSError:
        return None


def _look(process_id: int) -> tuple[str, int] | None:
    try:
        # A command may hold spaces and parentheses: what is read starts after the last of them.
        fields = Path(f"/proc/{process_id}/stat").read_text("latin-1").rpartition(")")[2].split()
        return fields[_STATE], int(fields[_START_TIME])
    except (OSError, IndexError, ValueError):
        return None
