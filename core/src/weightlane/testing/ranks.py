"""Runs a program on several trainer ranks of this machine and collects what each says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended: exit status (negative: the signal that ended it), output, and wall seconds."""

    rank: int
    status: int
    output: str
    seconds: float


@dataclass(slots=True)
class RankGroup:
    """Rank processes with the environment that `torch.distributed` expects (`env://`, loopback).

    Use it as a context manager: leaving it kills whatever still runs.
    """

    arguments: Sequence[str]
    world_size: int
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _started: float = 0.0

    def __enter__(self) -> Self:
        """Starts every rank."""
        folder = Path(tempfile.mkdtemp(prefix="weightlane-ranks-"))
        port = _free_port()
        self._started = time.monotonic()
        try:
            for rank in range(self.world_size):
                with interrupts_held():
                    self._start(rank, port, folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank: int, port: int, folder: Path) -> None:
        log = folder / f"rank-{rank}.log"
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }
        self._logs.append(log)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.python, *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def __exit__(self, *exc: object) -> None:
        """Kills what still runs and removes the logs."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        for log in self._logs:
            log.unlink(missing_ok=True)
        for folder in {log.parent for log in self._logs}:
            folder.rmdir()

    def process_id(self, rank: int) -> int:
        """The process of one rank."""
        return self._processes[rank].pid

    def kill(self, rank: int) -> None:
        """Ends one rank as a crash of its machine would: SIGKILL."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._logs[rank].read_text(errors="replace")

    def wait_for_output(self, rank: int, text: str, seconds: float) -> None:
        """Waits until a rank has printed `text`; raises TimeoutError with its output otherwise."""
        deadline = time.monotonic() + seconds
        while text not in self.output(rank):
            if time.monotonic() > deadline or self._processes[rank].poll() is not None:
                raise TimeoutError(f"rank {rank} did not print {text!r}; it printed:\n{self.output(rank)}")
            time.sleep(0.02)

    def wait(self, seconds: float, *, after_a_failure: float | None = None) -> list[RankOutcome]:
        """Waits for all ranks.

        Args:
            seconds: the bound for all of them.
            after_a_failure: by when the others are killed once a rank has ended with another status than 0:
                they may wait for it in a collective. None leaves them all of `seconds`.

        Raises:
            TimeoutError: a rank is still running then; with every rank's output.
        """
        began = time.monotonic()
        deadline = began + seconds
        ended: dict[int, float] = {}
        while len(ended) < self.world_size:
            now = time.monotonic()
            for rank, process in enumerate(self._processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = now - self._started
                    if process.returncode and after_a_failure is not None:
                        deadline = min(deadline, now + after_a_failure)
            late = [rank for rank in range(self.world_size) if rank not in ended]
            if late and now > deadline:
                if deadline == began + seconds:
                    self._tell_late(late[0], seconds)
                for rank in late:
                    os.killpg(self._processes[rank].pid, signal.SIGKILL)
                    self._processes[rank].wait(timeout=10)
            time.sleep(0.01)
        return [
            RankOutcome(rank, process.returncode, self.output(rank), ended[rank])
            for rank, process in enumerate(self._processes)
        ]

    def _tell_late(self, rank: int, seconds: float) -> None:
        told = "\n".join(f"--- rank {other} ---\n{self.output(other)}" for other in range(self.world_size))
        raise TimeoutError(f"rank {rank} still runs after {seconds:g} s\n{told}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
