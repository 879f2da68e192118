"""What the other ranks do on a control channel."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from weightlane.control import ControlChannel, RankPlace
from weightlane.errors import ExportError, WeightlaneError
from weightlane.failures import failure_of
from weightlane.messages import Done
from weightlane.rendezvous import open_control_channel

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LOST_AFTER = 2.0


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def open_channel(address: str | None, rank: int, world_size: int) -> ControlChannel:
    return open_control_channel(
        address=address, lane="lane-1", rank=rank, world_size=world_size, seconds=60.0, lost_after=LOST_AFTER
    )


def failure(channel: ControlChannel, error: Exception) -> None:
    channel.put(f"part/{channel.rank}", failure_of(error, origin=f"rank {channel.rank}"))


def gives_its_part(pipe: Connection, address: str, rank: int, world_size: int, kind: str) -> None:
    """Puts its part (or a failure), takes the controller's answer, tells it, and closes when told to."""
    channel = open_channel(address, rank, world_size)
    if kind == "fails":
        failure(channel, ExportError("w has no data.", "It is on the meta device.", "Materialise it."))
    elif kind == "aborts":
        channel.abort("sync-1", ExportError(f"rank {rank} cannot."))
    else:
        channel.put(f"part/{rank}", Done(rank * 10))
    try:
        told: object = channel.get("answer", Done, seconds=20, awaited=(0,), abort="sync-1")
    except WeightlaneError as error:
        told = (type(error).__name__, str(error))
    pipe.send(told if isinstance(told, tuple) else ("Done", str(told)))
    pipe.recv()
    channel.close()


def waits_for_the_controller(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    """Waits for what never comes; tells the error and how long after the word `now` it came."""
    channel = open_channel(address, rank, world_size)
    pipe.send("here")
    pipe.recv()
    started = time.monotonic()
    try:
        channel.get("never", Done, seconds=30, awaited=(0,))
    except WeightlaneError as error:
        pipe.send((type(error).__name__, str(error), time.monotonic() - started))


def is_the_controller(pipe: Connection, address: str, world_size: int) -> None:
    """Opens the channel, says so, and lives on."""
    channel = open_channel(address, 0, world_size)
    channel.know_places([place(0)])
    pipe.send("here")
    time.sleep(60)


def beats_only(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    """Lives on, and puts nothing."""
    open_channel(address, rank, world_size)
    pipe.send(place(rank))
    time.sleep(60)


def place(rank: int) -> RankPlace:
    return RankPlace(rank, "here", os.getpid())
