"""Folders and files that only their owner can have written: opened without following links, then checked."""

from __future__ import annotations

import os
import stat

from weightlane.errors import ProtocolError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a pipe put in a file's place would otherwise hold the open for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_private_folder(path: str, *, below: int | None = None) -> int:
    """A descriptor of the folder; `path` is absolute, or one name below the folder `below`.

    Raises:
        OSError: it cannot be opened, or is a link.
        ProtocolError: it belongs to somebody else, or others may look into it.
    """
    descriptor = os.open(path, _FOLDER, dir_fd=below)
    try:
        _require_private(path, os.fstat(descriptor), "folder", 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_private_file(name: str, *, below: int) -> int:
    """A descriptor of the regular file `name` in the folder `below`; raises as `open_private_folder`."""
    descriptor = os.open(name, _FILE, dir_fd=below)
    try:
        status = os.fstat(descriptor)
        _require_regular(name, status)
        _require_private(name, status, "file", 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolError(f"{name} is not a regular file.", "Something was put in its place.")


def _require_private(name: str, status: os.stat_result, kind: str, mode: int) -> None:
    found = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or found & 0o077:
        raise ProtocolError(
            f"{name} is not a private {kind} of this user.",
            f"It has owner {status.st_uid} and mode {found:04o}, and should be of user {os.getuid()} with "
            f"mode {mode:04o}.",
            "Run trainer and engine as the same user, and leave the files as they were written.",
        )
