"""What there is to say of the address on which an engine is to listen: two engines cannot share one."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from weightlane.errors import EngineError
from weightlane.front.address import is_front_address, parse_address

_PROBE_SECONDS = 0.5
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})
_LAST_PORT = 65535


def second_replica_note(address: str) -> str:
    """For an address that was proposed, which is the same on each call."""
    return f"A second replica on this host needs an address of its own: {_such_as(address)}."


def taken_note(address: str) -> str:
    """For an address that `is_taken`."""
    return (
        f"Something on this machine listens on {address} already, so that an engine started here could not: "
        f"stop it, or choose another address, {_such_as(address)}."
    )


def is_taken(address: str) -> bool:
    """Whether an address of this machine accepts connections; False where that cannot be told at once."""
    try:
        with _connected(address):
            return True
    except (EngineError, OSError, ValueError):
        return False


def _connected(address: str) -> socket.socket:
    if not is_front_address(address):
        parts = urlsplit(address)
        if parts.hostname not in _HERE or not parts.port:
            raise ValueError(f"{address} is not of this machine")
        return socket.create_connection((parts.hostname, parts.port), _PROBE_SECONDS)
    where = parse_address(address)
    probe = socket.socket(where.family, socket.SOCK_STREAM)
    try:
        probe.settimeout(_PROBE_SECONDS)
        probe.connect(where.target)
    except BaseException:
        probe.close()
        raise
    return probe


def _such_as(address: str) -> str:
    """The option that gives one beside this address."""
    if address.startswith("unix:"):
        return f"such as --address {address.removesuffix('.sock')}-2.sock"
    head, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) >= _LAST_PORT:
        return "give --address"
    return f"such as --address {head}:{int(port) + 1}"
