"""The option `--locked` of `backends`, `demo`, `doctor` and `launch-args`; `lock` has one of its own."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from weightlane.lock_file import read_lock
from weightlane.lock_keeper import LOCKED_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

Locked = Annotated[
    Optional[Path],  # noqa: UP045 - evaluated where typer reads it
    typer.Option("--locked", metavar="PATH", help="Refuse any backend that this lock does not name."),
]


@contextmanager
def held_lock(path: Path | None) -> Iterator[None]:
    """Puts a lock in force for this process and those that it starts, until the block ends.

    Raises:
        LockError: it cannot be read; better now than in each process.
    """
    if path is None:
        yield
        return
    read_lock(path)
    before = os.environ.get(LOCKED_VARIABLE)
    os.environ[LOCKED_VARIABLE] = str(path.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOCKED_VARIABLE]
        else:
            os.environ[LOCKED_VARIABLE] = before
