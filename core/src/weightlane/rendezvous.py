"""How the ranks of a lane find its control channel."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

# Where it is defined: torch.distributed re-exports it without saying so to type checkers.
from torch._C._distributed_c10d import TCPStore

from weightlane.control import CONTROLLER, ControlChannel, first_line
from weightlane.errors import ControlLostError
from weightlane.listening_store import serve_store


def open_control_channel(
    *, address: str | None, lane: str, rank: int, world_size: int, seconds: float, lost_after: float
) -> ControlChannel:
    """Opens the lane's channel on the controller and joins it from the other ranks.

    `address` is `tcp://host:port`, given equally on every rank, or None: then the store that
    `torch.distributed` was initialised with (MASTER_ADDR, MASTER_PORT) tells the ranks where the channel is,
    and a single process keeps it to itself. The server listens on loopback unless the address, or
    MASTER_ADDR, names another interface. `seconds` bounds the wait for a controller that comes later.

    Raises:
        ControlLostError: no way to find the channel, or nobody answers there.
    """
    named = address or os.environ.get("WEIGHTLANE_CONTROL", "")
    try:
        if named:
            host, port = _parse(named)
            server = _serve(host, port, seconds) if rank == CONTROLLER else None
        elif world_size == 1:
            host, port = "127.0.0.1", 0
            server = _serve(host, port, seconds)
            port = server.port
        else:
            host, port, server = _through_master_store(lane, rank, seconds)
        store = server or _join(host, port, seconds)
        beat_store = _join(host, port, seconds)
    except (RuntimeError, OSError, ValueError) as error:
        raise ControlLostError(
            f"Rank {rank} could not open the control channel of lane {lane} at "
            f"{named or 'the address that the MASTER store tells'}.",
            f"{first_line(error).rstrip('.')}.",
            "Pass the same control='tcp://host:port' to connect() on every rank.",
        ) from error
    return ControlChannel(
        store, beat_store, lane=lane, rank=rank, world_size=world_size, lost_after=lost_after
    )


def _parse(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise OSError(f"{address!r} is not of the form tcp://host:port")
    return parts.hostname, parts.port


def _serve(host: str, port: int, seconds: float) -> TCPStore:
    """A store whose server listens on `host` alone."""
    listener = socket.create_server((host, port), backlog=1024)
    bound_port = listener.getsockname()[1]
    return serve_store(listener.detach(), host=host, port=bound_port, seconds=seconds)


def _join(host: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _through_master_store(lane: str, rank: int, seconds: float) -> tuple[str, int, TCPStore | None]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port:
        raise OSError("MASTER_ADDR and MASTER_PORT are not set, and no control address was given")
    master = _join(host, int(port), seconds)
    # Its get is bounded by the store's timeout. Its set and gethostbyname below are not bounded by us: they
    # rely on a MASTER store and a resolver that already served torch.distributed in this very process.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"weightlane/control/{attempt}/{lane}"
    if rank == CONTROLLER:
        server = _serve(socket.gethostbyname(host), 0, seconds)
        master.set(key, f"{host}|{server.port}")
        return host, server.port, server
    found_host, found_port = master.get(key).decode().split("|")
    return found_host, int(found_port), None
