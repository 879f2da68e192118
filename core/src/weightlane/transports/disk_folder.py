"""The folder that a lane writes its versions to: one private folder a sync, the published one kept.

Everything below the lane's folder is reached through descriptors, so that a link put in a folder's place
leads nowhere. Each file is written under another name, synced to the disk and renamed; the manifest comes
last, so that a folder without one is not a version.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.bounded_calls import BoundedCalls
from weightlane.errors import SyncError, SyncTimeoutError
from weightlane.transports.disk_layout import MANIFEST_NAME
from weightlane.transports.disk_private import open_private_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

SYNC_FOLDER = re.compile(r"sync-\d+-version--?\d+", re.ASCII)
"""Names of the folders of single syncs; nothing else is opened below a lane's folder."""

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class SyncFolder:
    """The folder of one sync, open for writing."""

    def __init__(self, name: str, *, below: int) -> None:
        os.mkdir(name, 0o700, dir_fd=below)
        self.name = name
        self._descriptor = open_private_folder(name, below=below)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes a file of mode 0600 whole, or raises OSError and leaves none under that name."""
        unfinished = f".{name}.part"
        descriptor = os.open(unfinished, _NEW_FILE, 0o600, dir_fd=self._descriptor)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def settle(self) -> None:
        """Makes the names of the files as lasting as their bytes."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Idempotent; the files stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LaneFolder:
    """A lane's own folder on the controller, new and of mode 0700.

    All but `published` ask the file system, which may never answer: call them where nobody waits for ever.
    What hangs in one thread does not keep `start` from trying the same again in another.

    Args:
        lane: the lane's name, part of the folder's.
        parent: the folder that the user named, made if only its last part is missing; "" for a new folder
            among the system's temporary files, which is removed at `close` with all it holds.

    Raises:
        SyncError: the parent cannot be used; says why.
    """

    def __init__(self, lane: str, parent: str) -> None:
        self._temporary = not parent
        self._published: int | None = None
        self._folders: dict[int, str] = {}
        try:
            above = Path(parent or tempfile.gettempdir()).absolute()
            if parent:
                above.mkdir(mode=0o700, exist_ok=True)
            above = above.resolve(strict=True)
            _require_unshared(above)
            path = above / f"weightlane-{lane}-{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            self._descriptor = open_private_folder(str(path))
        except OSError as error:
            raise SyncError(
                f"Lane {lane} cannot make its folder in {parent or tempfile.gettempdir()}: "
                f"{error.strerror or error}.",
                f"Transport disk writes there as user {os.getuid()}.",
                "Pass connect(folder=...) a folder in which this user may write.",
            ) from error
        self.path = str(path)

    def start(self, sync: int, version: int) -> SyncFolder:
        """A new folder for one sync. What earlier syncs left that was never published is removed first."""
        self._remove_all_but(self._published)
        self._folders[sync] = f"sync-{sync}-version-{version}"
        return SyncFolder(self._folders[sync], below=self._descriptor)

    def published(self, sync: int) -> None:
        """Every replica serves this sync's version: from now on it is the one that is kept."""
        if sync in self._folders:
            self._published = sync

    def remove_unpublished(self) -> None:
        """Removes all but the published version. Never raises."""
        self._remove_all_but(self._published)

    def discard(self, sync: int) -> None:
        """Removes a failed sync's folder. Never raises; the published version stays."""
        if sync != self._published:
            self._remove(sync)

    def close(self) -> None:
        """Keeps the published version where the user named the folder, else nothing. Idempotent."""
        if self._descriptor < 0:
            return
        self._remove_all_but(None if self._temporary else self._published)
        os.close(self._descriptor)
        self._descriptor = -1
        if not self._folders:
            with contextlib.suppress(OSError):
                Path(self.path).rmdir()

    def _remove_all_but(self, kept: int | None) -> None:
        for sync in list(self._folders):
            if sync != kept:
                self._remove(sync)

    def _remove(self, sync: int) -> None:
        """Removes one sync's files, the manifest first; what cannot be removed now is tried again later."""
        name = self._folders.get(sync)
        if name is None or self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                _empty(name, self._descriptor)
                os.rmdir(name, dir_fd=self._descriptor)
            self._folders.pop(sync, None)


def open_lane_folder(lane: str, parent: str, seconds: float) -> LaneFolder:
    """A `LaneFolder`, waited for `seconds` at most.

    Raises:
        SyncError: as `LaneFolder`.
        SyncTimeoutError: the file system does not answer.
    """
    calls = BoundedCalls("weightlane-disk", seconds)
    try:
        return calls.run(lambda: LaneFolder(lane, parent))
    except TimeoutError as error:
        raise SyncTimeoutError(
            f"Lane {lane} did not get its folder in {parent or 'the temporary files'} within {seconds:g} s.",
            "The file system does not answer, or is too slow.",
            "Check it, or pass connect(folder=...) a folder elsewhere.",
        ) from error
    finally:
        calls.close()


def close_lane_folder(folder: LaneFolder, seconds: float) -> None:
    """Closes it, waited for `seconds` at most; never raises."""
    calls = BoundedCalls("weightlane-disk", seconds)
    with contextlib.suppress(OSError):  # a TimeoutError is one
        calls.run(folder.close)
    calls.close()


def _empty(name: str, below: int) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=below)
    try:
        # Without its manifest the folder is no version any more, whatever is left of it.
        for file in sorted(_names_in(descriptor), key=lambda file: file != MANIFEST_NAME):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile by a call that had hung
                os.unlink(file, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _names_in(descriptor: int) -> list[str]:
    with os.scandir(descriptor) as entries:
        return [entry.name for entry in entries]


def _require_unshared(folder: Path) -> None:
    """Raises PermissionError where others could put a folder of theirs in place of one of ours."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(0, f"it belongs to user {status.st_uid}")
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise PermissionError(0, f"others may rename what is in it (mode {mode:04o}, not sticky)")
