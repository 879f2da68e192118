"""The run folder: how code inside a server answers, since SGLang drops what a weight loader returns.

Trainer and server run as one user on one host and both know one folder: `WEIGHTLANE_RUN_FOLDER`, else
`/tmp/weightlane-<uid>`. Whoever asks makes a folder of a random name in it, and names it in the request; each
tensor-parallel rank writes one file there. Both sides follow no link and refuse a folder or file that another
user could have written; what a request says never leads out of the run folder.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.errors import EngineError, ProtocolError
from weightlane.transports.disk_private import open_private_file, open_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_FOLDER_VARIABLE = "WEIGHTLANE_RUN_FOLDER"
MOST_ANSWER_BYTES = 256 << 20

_TOKEN = re.compile(r"[0-9a-f]{32}")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_SECONDS = 0.02


def run_folder() -> str:
    """The run folder's absolute path; it need not be there yet.

    Raises:
        EngineError: the environment names a relative one, which another process could not find.
    """
    named = os.environ.get(RUN_FOLDER_VARIABLE, "")
    if named and not named.startswith("/"):
        raise EngineError(
            f"{RUN_FOLDER_VARIABLE}={named} is not an absolute path.",
            "Trainer and server have different working directories.",
            "Give the same absolute path to both, or leave it out.",
        )
    # Not the temporary folder of this process: the server may have another. It is made private.
    return named or f"/tmp/weightlane-{os.getuid()}"  # noqa: S108


class Exchange:
    """The asking side of one request: a folder for its answers, with `token` for its name."""

    def __init__(self, token: str, folder: int) -> None:
        self.token = token
        self._folder = folder

    def answers(self, ranks: int, *, within_seconds: float) -> tuple[bytes | None, ...]:
        """What each rank wrote; None for one whose file is not there in time.

        Raises:
            ProtocolError: a file is not this user's alone, is no regular file, or is too large.
        """
        deadline = time.monotonic() + within_seconds
        found: list[bytes | None] = []
        for rank in range(ranks):
            answer = self._read(rank)
            while answer is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                answer = self._read(rank)
            found.append(answer)
        return tuple(found)

    def _read(self, rank: int) -> bytes | None:
        name = _file_of(rank)
        try:
            descriptor = open_private_file(name, below=self._folder)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size > MOST_ANSWER_BYTES:
                raise ProtocolError(f"The answer {name} is larger than {MOST_ANSWER_BYTES >> 20} MiB.")
            return file.read()


@contextmanager
def exchange() -> Iterator[Exchange]:
    """A new folder for one request's answers, gone with all it holds when the block ends.

    Raises:
        EngineError: the run folder cannot be made, or is not this user's alone; the message says which.
    """
    path = run_folder()
    token = secrets.token_hex(16)
    try:
        Path(path).mkdir(mode=0o700, exist_ok=True)
        run = open_private_folder(path)
    except (OSError, ProtocolError) as error:
        raise EngineError(
            f"{path} cannot hold a server's answers: {error}",
            "Trainer and server meet there, and nobody else may write in it.",
            f"Make it a folder of your own with mode 0700, or name another by {RUN_FOLDER_VARIABLE} to both.",
        ) from error
    try:
        os.mkdir(token, 0o700, dir_fd=run)
        folder = open_private_folder(token, below=run)
        try:
            yield Exchange(token, folder)
        finally:
            # A rank that was given up may be writing its answer just now: then what is left stays behind.
            with suppress(OSError):
                with os.scandir(folder) as held:
                    names = [item.name for item in held]
                for name in names:
                    with suppress(FileNotFoundError):  # renamed meanwhile
                        os.unlink(name, dir_fd=folder)
                os.rmdir(token, dir_fd=run)
            os.close(folder)
    finally:
        os.close(run)


def write_answer(token: str, rank: int, data: bytes) -> None:
    """The answering side: one file, whole or not at all, in the folder that the asking side made.

    Makes no folder: where nobody waits any more, nothing is written.

    Raises:
        ProtocolError: `token` is no name that `exchange` gives, or a folder is not this user's alone.
        OSError: a folder is not there, is a link, or cannot be written to.
    """
    if not _TOKEN.fullmatch(token):
        raise ProtocolError(
            f"A request asks for an answer in {token[:80]!r}, which is not the name of an exchange."
        )
    with _folder(run_folder()) as run, _folder(token, below=run) as own:
        name = _file_of(rank)
        descriptor = os.open(f".{name}", _NEW_FILE, 0o600, dir_fd=own)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.rename(f".{name}", name, src_dir_fd=own, dst_dir_fd=own)


@contextmanager
def _folder(path: str, *, below: int | None = None) -> Iterator[int]:
    descriptor = open_private_folder(path, below=below)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _file_of(rank: int) -> str:
    return f"rank-{rank}"
