"""Starts an engine behind a front as a child process, and ends it with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import EngineDeadError, EngineError, SyncTimeoutError, WeightlaneError
from weightlane.front.client import FrontEndpoint
from weightlane.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_LOG_LINES_SHOWN = 25


@dataclass(frozen=True, slots=True)
class FrontProcess:
    """A running engine process; `log` holds its stdout and stderr."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_log_lines(self, count: int = _LOG_LINES_SHOWN) -> str:
        """The end of the engine's log."""
        return last_lines(self.log, count)


@contextmanager
def start_front_process(
    argv: Sequence[str],
    address: str,
    *,
    log: Path,
    ready_timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    shutdown_timeout_seconds: float = 10.0,
) -> Iterator[FrontProcess]:
    """Runs `argv` until the block ends; enters it once the front on `address` answers.

    The process leads a session of its own, so that at the end its whole process group can be killed,
    workers of the engine included.

    Args:
        argv: the command as a list; no shell is involved.
        address: where the command's front will listen.
        log: file for stdout and stderr, made anew with mode 0600.
        ready_timeout_seconds: bound for loading the engine.
        environment: variables added to this process's own.
        shutdown_timeout_seconds: how long a `Shutdown` may take before the group is killed.

    Raises:
        EngineDeadError: the process ended before its front answered; shows the end of its log.
        SyncTimeoutError: the front did not answer in time; shows the end of its log.
    """
    with ExitStack() as stack:
        with interrupts_held():
            process = _started(argv, log, environment or {})
            stack.callback(_end, process, address, shutdown_timeout_seconds)
        wait_for_front(process, address, log=log, timeout_seconds=ready_timeout_seconds)
        yield FrontProcess(address, process, log)


def _started(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # the mode above applies to a new file only
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise EngineDeadError(
            f"The engine process could not be started: {error}.", f"The command was {list(argv)}."
        ) from error
    finally:
        os.close(descriptor)


def wait_for_front(
    process: subprocess.Popen[bytes], address: str, *, log: Path, timeout_seconds: float
) -> None:
    """Returns when the front on `address` answers; raises as `start_front_process` does."""
    deadline = time.monotonic() + timeout_seconds
    endpoint = FrontEndpoint(address, timeout_seconds=5.0)
    while True:
        if process.poll() is not None:
            raise EngineDeadError(
                f"The engine process ended with status {process.returncode} before {address} answered.",
                f"The end of its log, {log}:\n{last_lines(log)}",
            )
        try:
            endpoint.facts()
        except (EngineDeadError, SyncTimeoutError):
            pass  # not listening yet, or too busy loading to answer
        else:
            return
        if time.monotonic() >= deadline:
            raise SyncTimeoutError(
                f"The front {address} did not answer within {timeout_seconds:g} s.",
                f"The end of the engine's log, {log}:\n{last_lines(log)}",
            )
        time.sleep(0.05)


def last_lines(path: Path, count: int = _LOG_LINES_SHOWN) -> str:
    """The last `count` lines of a log, or a note that there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count * 400))
            lines = file.read().decode(errors="replace").splitlines()[-count:]
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(lines) or "(the log is empty)"


def _end(process: subprocess.Popen[bytes], address: str, timeout_seconds: float) -> None:
    """Asks the process to end, then kills its group; the group may outlive its leader."""
    if process.poll() is None:
        with contextlib.suppress(WeightlaneError):
            FrontEndpoint(address, timeout_seconds=min(2.0, timeout_seconds)).shutdown()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"The engine process {process.pid} could not be killed.") from error
