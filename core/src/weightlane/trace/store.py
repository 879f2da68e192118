"""Placement tables kept in a private folder, so that what was traced once need not be traced again.

A table is found by its key and by the sources that it is about. A file that is damaged, that somebody else
could have written, or that holds another table than its name says is left alone with a warning: whoever asked
traces again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from typing import TYPE_CHECKING

import msgspec
import xxhash

from weightlane.errors import ProtocolError
from weightlane.messages import WireTensor
from weightlane.trace.table import PlacementTable, TableKey
from weightlane.trace.table_check import require_table
from weightlane.transports.disk_private import open_private_file, open_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FORMAT = 1
_MOST_BYTES = 1 << 29
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TableStoreWarning(UserWarning):
    """A stored table was not used; names the file and why."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    digest: str
    table: PlacementTable


class TableStore:
    """Tables in one folder.

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

    def get(self, key: TableKey, tensors: Sequence[WireTensor]) -> PlacementTable | None:
        """The table of this key about these tensors (canonical names, full shapes), in any order.

        None where there is none that can be used; warns (`TableStoreWarning`) where there is a file.
        """
        name = _name_of(key, tensors)
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
            return _table_in(data, key, tensors)
        except (msgspec.DecodeError, ProtocolError, RecursionError) as error:
            self._warn(name, error)
            return None

    def put(self, table: PlacementTable) -> Path:
        """Keeps a table, in place of one about the same; gives its file, of mode 0600."""
        name = _name_of(table.key, _tensors_of(table))
        data = msgspec.msgpack.encode(_Stored(_FORMAT, table.digest(), table))
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
            f"The placement table in {self._folder / name} is not used: {error} "
            "It is traced again where that can be done; remove the file to be rid of this warning.",
            TableStoreWarning,
            stacklevel=3,
        )


def _table_in(data: bytes, key: TableKey, tensors: Sequence[WireTensor]) -> PlacementTable:
    stored = msgspec.msgpack.decode(data, type=_Stored)
    if stored.format != _FORMAT:
        raise ProtocolError(f"It has format {stored.format}, and this weightlane reads {_FORMAT}.")
    if stored.table.digest() != stored.digest:
        raise ProtocolError(f"Its digest is {stored.table.digest()}, and it says {stored.digest}.")
    if stored.table.key != key:
        raise ProtocolError(f"It is of {stored.table.key}, not of {key}.")
    require_table(stored.table, tensors, sender="a file")
    return stored.table


def _tensors_of(table: PlacementTable) -> list[WireTensor]:
    return [WireTensor(source.canonical, source.shape, source.dtype) for source in table.sources]


def _name_of(key: TableKey, tensors: Sequence[WireTensor]) -> str:
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    digest = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(ordered))
    return f"{xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(key))}-{digest}.table"
