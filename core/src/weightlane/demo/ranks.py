"""Starts the trainer ranks as child processes, reads what they report, and ends them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlane.demo.messages import Broken, line_of, read_rank_message
from weightlane.errors import ControlLostError, SyncTimeoutError
from weightlane.failures import error_of
from weightlane.front.process import last_lines
from weightlane.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from weightlane.demo.messages import RankMessage, Task

_LOOPBACK = "127.0.0.1"
_READ_BYTES = 1 << 16
_LAST_WORD_SECONDS = 2.0
_END_SECONDS = 10.0


@dataclass(slots=True)
class RankProcess:
    """A started rank; `pending` holds what it reported of a line that has not ended yet."""

    rank: int
    process: subprocess.Popen[bytes]
    reports: int
    log: Path
    pending: bytearray = field(default_factory=bytearray)


class TrainerRanks:
    """The running ranks. Their reports are those of rank 0; a rank that breaks or ends early raises."""

    def __init__(self, ranks: tuple[RankProcess, ...]) -> None:
        self._ranks = ranks
        self._ready: list[RankMessage] = []
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.reports, selectors.EVENT_READ, rank)

    def give(self, task: Task) -> None:
        """Sends the task to every rank. A rank that is gone shows when the next report is awaited."""
        for rank in self._ranks:
            if rank.process.stdin is None:
                raise AssertionError("ranks are started with a pipe as standard input")
            with suppress(BrokenPipeError):
                rank.process.stdin.write(line_of(task))
                rank.process.stdin.flush()

    def next_report(self, awaited: str, *, seconds: float) -> RankMessage:
        """The next report of any rank; `awaited` says in an error what was waited for.

        Raises:
            WeightlaneError: what a rank says stopped it.
            ControlLostError: a rank ended without a word; shows the end of its log.
            SyncTimeoutError: nothing came in time; shows the ends of all logs.
        """
        deadline = time.monotonic() + seconds
        while not self._ready:
            left = deadline - time.monotonic()
            if left <= 0:
                logs = "\n".join(f"rank {rank.rank}: {last_lines(rank.log, 5)}" for rank in self._ranks)
                raise SyncTimeoutError(
                    f"The trainer ranks reported nothing for {seconds:g} s while {awaited}.",
                    f"The ends of their logs:\n{logs}",
                )
            for key, _ in self._selector.select(left):
                self._read(key.data)
        message = self._ready.pop(0)
        if isinstance(message, Broken):
            raise error_of(message.failure)
        return message

    def finish(self, *, seconds: float) -> None:
        """Waits until every rank has ended by itself.

        Raises:
            WeightlaneError: a rank broke while it let go of the lane, or did not end in time.
        """
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            try:
                status = rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise SyncTimeoutError(
                    f"Trainer rank {rank.rank} had not ended {seconds:g} s after its last report.",
                    f"The end of its log:\n{last_lines(rank.log)}",
                ) from None
            if status != 0:
                self.next_report("ending", seconds=1.0)

    def _read(self, rank: RankProcess) -> None:
        data = os.read(rank.reports, _READ_BYTES)  # bounded by the selector, which said that there is some
        rank.pending += data
        *lines, rest = bytes(rank.pending).split(b"\n")
        rank.pending = bytearray(rest)
        self._ready += [read_rank_message(line, rank=rank.rank) for line in lines]
        if data:
            return
        self._selector.unregister(rank.reports)
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(_LAST_WORD_SECONDS)
        if rank.process.returncode != 0 and not self._ready:
            raise ControlLostError(
                f"Trainer rank {rank.rank} ended with status {rank.process.returncode} without a report.",
                f"The end of its log:\n{last_lines(rank.log)}",
            )


@contextmanager
def start_trainer_ranks(
    count: int, folder: Path, *, make_model: Path | None, seed: int
) -> Iterator[TrainerRanks]:
    """`count` rank processes, each with one thread, until the block ends.

    They begin to import at once and wait for their task. Each leads a session of its own, so that Ctrl-C
    reaches the command alone, and ends itself when the command is gone.

    Args:
        count: how many ranks.
        folder: for their logs.
        make_model: where rank 0 writes the tiny model first; None for no model.
        seed: of that model.
    """
    with ExitStack() as stack:
        # Handing rank 0 the listening socket leaves no moment in which another process could take the port.
        listener = stack.enter_context(socket.create_server((_LOOPBACK, 0)))
        started: list[RankProcess] = []
        stack.callback(_end_all, started)
        for rank in range(count):
            extra = ["--seed", str(seed)]
            if rank == 0:
                extra += ["--listen-on", str(listener.fileno())]
                extra += ["--make-model", str(make_model)] if make_model else []
            inherited = (listener.fileno(),) if rank == 0 else ()
            environment = _environment(port=listener.getsockname()[1])
            with interrupts_held():
                started.append(_start(rank, count, folder, extra, environment, inherited))
        listener.close()
        yield TrainerRanks(tuple(started))


def _start(
    rank: int,
    count: int,
    folder: Path,
    extra: list[str],
    environment: dict[str, str],
    inherited: tuple[int, ...],
) -> RankProcess:
    log = folder / f"rank-{rank}.log"
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "weightlane.demo.rank"]
    command += ["--rank", str(rank), "--ranks", str(count), "--report-to", str(writing), *extra]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(writing, *inherited),
                start_new_session=True,
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return RankProcess(rank, process, reading, log)


def _environment(*, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _end_all(ranks: Sequence[RankProcess]) -> None:
    """Ends every rank's process group, whether or not the others can be ended."""
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(_end, rank)


def _end(rank: RankProcess) -> None:
    with suppress(ProcessLookupError):
        os.killpg(rank.process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        rank.process.wait(_END_SECONDS)
    if rank.process.stdin is not None:
        with suppress(BrokenPipeError):
            rank.process.stdin.close()
    with suppress(OSError):
        os.close(rank.reports)
