"""A private folder whose path leaves room for a unix socket's name."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_PARENT = 60  # a socket's path has 107 bytes; the folder's own name and the socket's take the rest
_PREFIX = "weightlane-"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end with all it holds.

    It lies in the temporary folder, unless that has so long a path that no unix socket fits below it; then
    in the system's own `/tmp`.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes a private folder there
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
