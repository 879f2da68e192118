"""The lock file: which plugins a run selected, in JSON that people can read, review and commit.

::

    weightlane lock                       # write weightlane.lock
    weightlane lock --locked weightlane.lock   # does this environment still select the same?
    WEIGHTLANE_LOCKED=weightlane.lock torchrun train.py   # refuse anything else
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import msgspec

from weightlane.errors import LockError
from weightlane.types import Role

DEFAULT_LOCK = Path("weightlane.lock")
_MOST_BYTES = 1 << 20


class LockedBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One selected backend.

    `entry_point` is the plugin's name in its distribution. `engine_version` and `evidence` tell on what it
    was chosen: they are shown when a later selection differs, and do not make it differ.
    """

    role: Role
    engine: str
    backend: str
    era: str
    distribution: str
    version: str
    entry_point: str
    engine_version: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Backend, era, distribution and version, as `Selected.origin` words them."""
        return f"{self.backend} ({self.era}) of {self.distribution} {self.version}".rstrip()


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a lock file holds. `weightlane` is the version of core; several rows may name one engine."""

    format: Literal[1] = 1
    weightlane: str
    backends: tuple[LockedBackend, ...]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits: equal on ranks that hold the same lock."""
        import hashlib

        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def read_lock(path: Path) -> Lock:
    """Reads a lock.

    Raises:
        LockError: it is not there, no plain file, writable by everybody, or no lock of this format; a field
            that is not known is an error.
    """
    try:
        # Not blocking, so that a pipe in its place is refused rather than waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise LockError(
            f"The lock {path} cannot be opened.",
            f"{exc.strerror or exc}.",
            "Write one with weightlane lock, or name another path.",
        ) from exc
    try:
        _require_safe(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        return msgspec.json.decode(data, type=Lock)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise LockError(
            f"{path} is no lock that weightlane can read.",
            f"{exc}.",
            "Write it anew with weightlane lock; it is not meant to be edited.",
        ) from exc


def write_lock_file(lock: Lock, path: Path) -> None:
    """Writes a lock, readable by its owner alone, in place of an older one or where nothing is.

    Raises:
        LockError: the folder is not there, something that is no lock has this path, or it cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise _unwritable(path, f"{path.absolute().parent} is not a folder")
    if path.is_symlink():
        raise _unwritable(path, "it is a symbolic link")
    if path.exists():
        try:
            read_lock(path)
        except LockError as exc:
            raise _unwritable(path, f"something else is there: {exc.why.rstrip('.')}") from exc
    import tempfile  # takes 10 ms, and few processes write a lock

    temporary: Path | None = None
    try:
        # Beside it, so that a reader sees the old lock or the new one and never a part; made with mode 0600.
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        temporary = Path(name)
        os.close(descriptor)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(lock), indent=2) + b"\n")
        temporary.replace(path)
    except OSError as exc:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, exc.strerror or str(exc)) from exc


def _require_safe(path: Path, status: os.stat_result) -> None:
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "It is not a plain file."
    elif status.st_mode & stat.S_IWOTH:
        reason = f"Everybody may write to it (mode {stat.S_IMODE(status.st_mode):04o}), so it guards nothing."
    elif status.st_size > _MOST_BYTES:
        reason = f"It has {status.st_size} bytes, more than any lock ({_MOST_BYTES})."
    if reason:
        raise LockError(f"The lock {path} is not used.", reason, "Name a file that weightlane lock wrote.")


def _unwritable(path: Path, reason: str) -> LockError:
    return LockError(
        f"The lock cannot be written to {path}.",
        f"{reason}.",
        "Give --out another path, or remove what is there.",
    )
