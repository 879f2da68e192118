"""The tables of models that are built without data, kept in a private folder so that none is built twice.

They are found by all that they depend on (`built_from`). A file that is damaged, that somebody else could
have written, or that is about something else than its name says is left alone with a warning: whoever asked
traces again. Tables of a live engine are never kept here: it may be started otherwise under the same key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from weightlane.errors import ProtocolError
from weightlane.trace.built_from import BuiltFrom
from weightlane.trace.table import PlacementTable
from weightlane.trace.table_check import require_table, require_workers
from weightlane.transports.disk_private import open_private_file, open_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightlane.messages import WireTensor

_FORMAT = 2
_MOST_BYTES = 1 << 29
_MOST_KEPT = 32
_ENDING = ".tables"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TableStoreWarning(UserWarning):
    """Kept tables were not used; names the file and why."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    about: BuiltFrom
    digests: tuple[str, ...]
    tables: tuple[PlacementTable, ...]


def user_folder(environ: Mapping[str, str]) -> Path:
    """Where this user's tables are: below `XDG_CACHE_HOME`, else below `~/.cache`.

    Raises:
        RuntimeError: this user has no home.
    """
    named = environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path counts for nothing.
    parent = Path(named) if named.startswith("/") else Path.home() / ".cache"
    return parent / "weightlane" / "tables"


class TableStore:
    """Tables in one folder, of the models that were traced last.

    Args:
        folder: made with mode 0700 if it is not there; a private one of this user otherwise.

    Raises:
        ProtocolError: it belongs to somebody else, or others may look into it.
        OSError: it cannot be made or opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened():
            pass

    def path_of(self, about: BuiltFrom) -> Path:
        """The file that these tables are in, or would be."""
        return self._folder / _name_of(about)

    def get(self, about: BuiltFrom, tensors: Sequence[WireTensor]) -> tuple[PlacementTable, ...] | None:
        """The tables of all workers, about these tensors (canonical names, full shapes).

        None where there are none that can be used; warns (`TableStoreWarning`) where there is a file.
        """
        name = _name_of(about)
        with self._opened() as folder:
            try:
                descriptor = open_private_file(name, below=folder)
            except FileNotFoundError:
                return None
            except (OSError, ProtocolError) as error:
                self._warn(name, error)
                return None
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
        try:
            return _tables_in(data, about, tensors)
        except (msgspec.DecodeError, ProtocolError, RecursionError) as error:
            self._warn(name, error)
            return None

    def put(self, about: BuiltFrom, tables: tuple[PlacementTable, ...]) -> Path:
        """Keeps tables, in place of those about the same; gives their file, of mode 0600.

        Those that were written first go where there are too many.

        Raises:
            OSError: it cannot be written.
        """
        name = _name_of(about)
        digests = tuple(table.digest() for table in tables)
        data = msgspec.msgpack.encode(_Stored(_FORMAT, about, digests, tables))
        with self._opened() as folder:
            made = f".{name}.{secrets.token_hex(8)}"
            descriptor = os.open(made, _NEW_FILE, 0o600, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(made, dir_fd=folder)
                raise
            _drop_oldest(folder)
        return self._folder / name

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = open_private_folder(str(self._folder))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _warn(self, name: str, error: Exception) -> None:
        warnings.warn(
            f"The placement tables in {self._folder / name} are not used: {error} "
            "They are traced again; remove the file to be rid of this warning.",
            TableStoreWarning,
            stacklevel=3,
        )


def _tables_in(
    data: bytes, about: BuiltFrom, tensors: Sequence[WireTensor]
) -> tuple[PlacementTable, ...] | None:
    stored = msgspec.msgpack.decode(data, type=_Stored)
    if stored.format != _FORMAT:
        raise ProtocolError(f"They have format {stored.format}, and this weightlane reads {_FORMAT}.")
    if tuple(table.digest() for table in stored.tables) != stored.digests:
        raise ProtocolError("They are not those that were written: their digests differ.")
    if stored.about != about:
        raise ProtocolError(f"They are about {stored.about}, not about {about}.")
    require_workers(stored.tables, sender="a file")
    for table in stored.tables:
        require_table(table, tensors, sender="a file")
    return stored.tables


def _name_of(about: BuiltFrom) -> str:
    return f"{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(about))}{_ENDING}"


def _drop_oldest(folder: int) -> None:
    written: list[tuple[int, str]] = []
    for name in os.listdir(folder):
        if name.endswith(_ENDING):
            with contextlib.suppress(FileNotFoundError):  # another process may drop it at the same time
                at = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns
                written.append((at, name))
    for _, name in sorted(written, reverse=True)[_MOST_KEPT:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
