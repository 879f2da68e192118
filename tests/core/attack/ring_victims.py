"""What other processes do with rings that are being damaged."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fake_engine import FakeWorkerEngine, ask, attached, plan
from resources import LABEL

from weightlane.buckets import slot_sizes
from weightlane.errors import WeightlaneError
from weightlane.messages import Attach, Receive
from weightlane.ring import RingReader, RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

LAYOUTS = plan().buckets
SIZES = slot_sizes(LAYOUTS)


def outcome_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except WeightlaneError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def uses_both_ends(pipe: Connection, cut_to: int) -> None:
    """Opens both ends of a ring, has its file cut, and does with either end all that there is to do."""
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    reader = RingReader(str(writer.path), SIZES)
    writer.begin(1)
    reader.begin(1)
    os.truncate(writer.path, cut_to)
    bounds = {"sync": 1, "seconds": 0.2, "lost_after": 9.0}
    layout = LAYOUTS[0]
    pipe.send(
        {
            "acquire": outcome_of(lambda: writer.acquire(layout, check=nothing_to_check, **bounds)),
            "post": outcome_of(lambda: writer.post(layout, sync=1)),
            "drain": outcome_of(lambda: writer.drain(check=nothing_to_check, **bounds)),
            "writer begins": outcome_of(lambda: writer.begin(2)),
            "take": outcome_of(lambda: reader.take(layout, **bounds)),
            "release": outcome_of(lambda: reader.release(layout, sync=1)),
            "reader begins": outcome_of(lambda: reader.begin(2)),
        }
    )
    # None of these may raise, nor end the process.
    writer.beat()
    reader.beat()
    writer.abort("it was cut")
    reader.fail("it was cut")
    reader.close()
    writer.close()
    pipe.send("alive")


def touches_what_was_cut(pipe: Connection, path: str) -> None:
    """The control: what `uses_both_ends` would be without looking first."""
    with Path(path).open("r+b") as file:
        file.truncate(8192)
        memory = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
    pipe.send("about to touch")
    pipe.send(memory[0])


def agent_meets_a_cut_ring(pipe: Connection) -> None:
    """An agent that has attached to a ring whose file is cut before the sync."""
    writer = RingWriter(label="attack", slot_sizes=SIZES, peer="worker 0")
    engine = FakeWorkerEngine()
    agent = attached(engine)
    ask(agent, Attach(plan(transport="shm", ring={0: str(writer.path)})))
    os.truncate(writer.path, 100)
    receive = Receive("lane-1", "p1", 1, 10, {0: "first"}, 0.2, 9.0)
    pipe.send(outcome_of(lambda: ask(agent, receive)))
    pipe.send((agent.servable, engine.writes))
    writer.close()


def makes_rings(pipe: Connection, hidden: bool) -> None:
    """A trainer that waits to be killed; `hidden`: its reader has attached."""
    writer = RingWriter(label=f"{LABEL}-killed", slot_sizes=SIZES, peer="worker 0")
    pipe.send(str(writer.path))
    if hidden:
        pipe.recv()
        writer.hide()
        pipe.send("hidden")
    pipe.recv()
