"""The file behind a ring: new, private to the user, in shared memory; opened only if it is all that.

Its maker holds a lock on it (`flock`) for as long as it has it mapped. The kernel lets go of the lock when
the process ends, however it ends, so that a file whose lock can be had is nobody's any more. That holds
across containers that share the folder, where process numbers would mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from weightlane.errors import ProtocolError, SyncError

_PREFIX, _SUFFIX = "weightlane-", ".ring"
_UNLOCKED_SECONDS = 60.0
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def shared_memory_folder() -> Path:
    """Where rings live: the memory file system where there is one, else the temporary folder."""
    memory = Path("/dev/shm")  # noqa: S108 - what is made in it is new, private and unguessable
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class PrivateFile:
    """An open ring file, all `nbytes` of it mapped.

    Attributes:
        path: its name, which may be gone.
        descriptor: keeps the maker's lock, and tells the size; closed by `close`.
        memory: the mapping.
    """

    path: Path
    descriptor: int
    memory: mmap.mmap
    nbytes: int

    def require_whole(self) -> None:
        """Raises ProtocolError when somebody has cut the file: touching what is gone would end the process.

        Only who opened it by its name could, and the name goes when the reader has attached.
        """
        if os.fstat(self.descriptor).st_size != self.nbytes:
            raise ProtocolError(
                f"Ring {self.path} was cut to {os.fstat(self.descriptor).st_size} of {self.nbytes} bytes.",
                "Another process of this user changed its file.",
                "Connect again.",
            )

    def is_abandoned(self) -> bool:
        """Whether its maker has closed it or is gone; to be asked by the other side only."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Unmaps and closes; a live view of the mapping keeps its pages until it is gone."""
        # A live tensor view exports the mapping; unmapping under it would crash the process.
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self.descriptor)


def create_private_file(label: str, nbytes: int) -> PrivateFile:
    """A new file of mode 0600 whose memory is already reserved; removes those that killed processes left.

    Raises:
        SyncError: there is not that much shared memory.
    """
    folder = shared_memory_folder()
    remove_abandoned(folder)
    path = folder / f"{_PREFIX}{label}-{secrets.token_hex(8)}{_SUFFIX}"
    descriptor = -1
    try:
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        # Nobody but `remove_abandoned` of another process can hold it: bounded by what that does, an unlink.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Reserved now, since writing to a mapped page that does not fit would end the process by SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
        return PrivateFile(path, descriptor, mmap.mmap(descriptor, nbytes), nbytes)
    except OSError as error:
        if descriptor >= 0:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        raise SyncError(
            f"Shared memory for a ring of {nbytes} bytes could not be had in {path.parent}.",
            f"{error}.",
            "Free shared memory, enlarge it (containers often have 64 MB), or use smaller buckets.",
        ) from error


def remove_abandoned(folder: Path) -> None:
    """Removes the ring files of this user whose makers are gone: killed before their readers had attached."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        # Another user's, or one that its maker holds; or somebody else has just removed it.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS)
            try:
                status = os.fstat(descriptor)
                # One without a byte may have been made this moment, and not be locked yet.
                fresh = not status.st_size and time.time() - status.st_mtime < _UNLOCKED_SECONDS
                if _is_private(status) and not fresh:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def map_private_file(path: Path, nbytes: int) -> PrivateFile:
    """Maps a file that the peer made.

    Raises:
        ProtocolError: it is missing, not a private file of this user, or of another size.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        raise ProtocolError(
            f"Ring {path} cannot be opened.",
            f"{error}: trainer and engine see different files, or run as different users.",
            "Share /dev/shm between their containers (--ipc=host), or choose transport='inline'.",
        ) from error
    try:
        status = os.fstat(descriptor)
        _refuse_foreign_file(path, status)
        _refuse_other_size(path, status, nbytes)
        return PrivateFile(path, descriptor, mmap.mmap(descriptor, nbytes), nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _is_private(status: os.stat_result) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & 0o077
        and status.st_nlink == 1
    )


def _refuse_other_size(path: Path, status: os.stat_result, nbytes: int) -> None:
    if status.st_size != nbytes:
        raise ProtocolError(
            f"Ring {path} has {status.st_size} bytes, but the plan's slots need {nbytes}.",
            "Sender and receiver hold different plans.",
            "Close the lane and connect again.",
        )


def _refuse_foreign_file(path: Path, status: os.stat_result) -> None:
    if not _is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ProtocolError(
            f"Ring {path} is not a private file of this user.",
            f"It has owner {status.st_uid}, mode {mode:04o} and {status.st_nlink} names; a ring is a regular "
            f"file of user {os.getuid()} with mode 0600 and one name.",
            "Run trainer and engine as the same user.",
        )
