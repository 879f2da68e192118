"""A private folder whose path leaves room for a unix socket's name."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
_LONGEST_PARENT = 60  # a socket's path has 107 bytes; the folder's own name and the socket's take the rest
_PREFIX = "weightlane-"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end with all it holds.

    It lies in the temporary folder, unless that has so long a path that no unix socket fits below it; then
    in the system's own `/tmp`.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_temporary(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def proposed_address(engine: str) -> str:
    """Where a front of this user listens when nobody says otherwise: the same on each call.

    In the user's runtime folder, else in a folder of the user's own below the temporary one. The front makes
    the folder with mode 0700, and refuses one that is not its user's alone.
    """
    runtime = os.environ.get(RUNTIME_VARIABLE, "")
    if runtime.startswith("/") and len(os.fsencode(runtime)) <= _LONGEST_PARENT:
        return f"unix:{runtime}/weightlane/{engine}.sock"
    return f"unix:{_temporary()}/{_PREFIX}{os.getuid()}/{engine}.sock"


def _temporary() -> str:
    parent = tempfile.gettempdir()
    # Folders there are made private.
    return parent if len(os.fsencode(parent)) <= _LONGEST_PARENT else "/tmp"  # noqa: S108
