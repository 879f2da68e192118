"""Makes locks of selections and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightlane import __version__
from weightlane.errors import LockError
from weightlane.lock_file import Lock, LockedBackend, write_lock_file

if TYPE_CHECKING:
    from collections.abc import Iterable


def write_lock(path: str | Path = "weightlane.lock") -> Lock:
    """Writes what this process has selected so far: after `connect`, on rank 0, the whole run's selection.

    Args:
        path: a new file, or a lock to replace.

    Raises:
        LockError: nothing was selected yet, or the file cannot be written.
    """
    from weightlane.registry import get_registry

    lock = lock_of(get_registry().locks.selections())
    write_lock_file(lock, Path(path))
    return lock


def lock_of(backends: Iterable[LockedBackend]) -> Lock:
    """A lock of these selections, in a stable order and each once.

    Raises:
        LockError: there are none; such a lock would refuse everything.
    """
    rows = sorted(
        set(backends), key=lambda row: (row.role, row.engine, row.distribution, row.era, row.evidence)
    )
    if not rows:
        raise LockError(
            "There is nothing to lock.",
            "No backend has been selected.",
            "Call connect first, or name engines that can be selected here: weightlane backends lists them.",
        )
    return Lock(weightlane=__version__, backends=tuple(rows))
