"""The file behind a ring: new, private to the user, in shared memory; opened only if it is all that."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import tempfile
from pathlib import Path

from weightlane.errors import ProtocolError, SyncError


def shared_memory_folder() -> Path:
    """Where rings live: the memory file system where there is one, else the temporary folder."""
    memory = Path("/dev/shm")  # noqa: S108 - what is made in it is new, private and unguessable
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def create_private_file(label: str, nbytes: int) -> Path:
    """A new file of mode 0600 whose memory is already reserved.

    Raises:
        SyncError: there is not that much shared memory.
    """
    path = shared_memory_folder() / f"weightlane-{label}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        # Reserved now, since writing to a mapped page that does not fit would end the process by SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink()
        raise SyncError(
            f"Shared memory for a ring of {nbytes} bytes could not be had in {path.parent}.",
            f"{error}.",
            "Free shared memory, enlarge it (containers often have 64 MB), or use smaller buckets.",
        ) from error
    finally:
        os.close(descriptor)
    return path


def map_private_file(path: Path, nbytes: int) -> mmap.mmap:
    """Maps a file that the peer made.

    Raises:
        ProtocolError: it is missing, not a private file of this user, or of another size.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ProtocolError(
            f"Ring {path} cannot be opened.",
            f"{error.strerror}: trainer and engine see different files, or run as different users.",
            "Share /dev/shm between their containers (--ipc=host), or choose transport='inline'.",
        ) from error
    try:
        status = os.fstat(descriptor)
        _refuse_foreign_file(path, status)
        if status.st_size != nbytes:
            raise ProtocolError(
                f"Ring {path} has {status.st_size} bytes, but the plan's slots need {nbytes}.",
                "Sender and receiver hold different plans.",
                "Close the lane and connect again.",
            )
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _refuse_foreign_file(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise ProtocolError(
            f"Ring {path} is not a private file of this user.",
            f"It has owner {status.st_uid} and mode {mode:04o}; a ring is owned by user {os.getuid()} with "
            "mode 0600.",
            "Run trainer and engine as the same user.",
        )
