"""The lock that a registry holds to, and what has been selected so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.lock_check import HeldLock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.lock_file import LockedBackend

LOCKED_VARIABLE = "WEIGHTLANE_LOCKED"


class LockKeeper:
    """One registry's lock, read when it is first needed, and its selections.

    Args:
        environ: where `WEIGHTLANE_LOCKED` is looked up.
        path: a lock that goes before that of the environment.
    """

    def __init__(self, environ: Mapping[str, str], path: Path | None = None) -> None:
        self._environ = environ
        self._path = path
        self._read: tuple[Path, HeldLock] | None = None
        self._selections: dict[LockedBackend, None] = {}

    @property
    def held(self) -> HeldLock | None:
        """The lock in force, or None.

        Raises:
            LockError: it cannot be used.
        """
        variable = self._environ.get(LOCKED_VARIABLE, "").strip()
        path = self._path or (Path(variable) if variable else None)
        if path is None:
            return None
        if self._read is None or self._read[0] != path:
            from weightlane.lock_file import read_lock

            by = "" if self._path else f", by {LOCKED_VARIABLE}"
            self._read = (path, HeldLock(read_lock(path), f"{path}{by}"))
        return self._read[1]

    def remember(self, backend: LockedBackend) -> None:
        """Notes that this process selected a backend, for `weightlane.write_lock`."""
        self._selections[backend] = None

    def selections(self) -> tuple[LockedBackend, ...]:
        """What this process has selected so far, in order."""
        return tuple(self._selections)
