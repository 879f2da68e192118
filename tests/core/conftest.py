"""Other processes for tests of core, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


@dataclass
class Peer:
    process: BaseProcess
    pipe: Connection

    def told(self, seconds: float = 30.0) -> Any:
        assert self.pipe.poll(seconds), "the peer says nothing"
        return self.pipe.recv()


@pytest.fixture(scope="session")
def start_peer() -> Callable[..., Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "weightlane.ring", "weightlane.rendezvous"])

    @contextmanager
    def start(target: Callable[..., None], *arguments: Any) -> Iterator[Peer]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        try:
            yield Peer(process, ours)
        finally:
            process.kill()
            process.join(10)
            ours.close()
            process.close()

    return start
