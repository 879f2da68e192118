"""Addresses of fronts: `unix:/path` and `tcp:127.0.0.1:port`, and who may connect to them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from weightlane.errors import EngineError, Problem

KEY_VARIABLE = "WEIGHTLANE_FRONT_KEY"
"""Environment variable that holds the shared key of `tcp:` fronts; `unix:` fronts rely on their folder."""

_LONGEST_UNIX_PATH = 107  # sockaddr_un.sun_path holds 108 bytes, one of them the closing zero

_CREDENTIALS = struct.Struct("iii")  # ucred: process, user and group (unix(7))
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class FrontAddress:
    """A parsed address; `path` for `unix:`, `host` and `port` for `tcp:`."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def family(self) -> socket.AddressFamily:
        """The socket family."""
        return socket.AF_UNIX if self.path else socket.AF_INET

    @property
    def target(self) -> str | tuple[str, int]:
        """What `socket.connect` and `socket.bind` take."""
        return self.path or (self.host, self.port)


def is_front_address(text: str) -> bool:
    """Whether `text` names a front, as opposed to a URL."""
    return text.startswith(("unix:", "tcp:"))


def parse_address(text: str) -> FrontAddress:
    """Parses `unix:/path` or `tcp:127.0.0.1:port`.

    Raises:
        EngineError: another form, a relative or overlong path, or a host that is not loopback.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise _bad(text, "The path of a unix socket must be absolute.")
        try:
            length = len(os.fsencode(rest))
        except UnicodeEncodeError as error:
            raise _bad(text, f"The path of a unix socket must be encodable: {error.reason}.") from error
        if "\0" in rest:
            raise _bad(text, "The path of a unix socket holds no zero byte.")
        if length > _LONGEST_UNIX_PATH:
            raise _bad(text, f"The path of a unix socket may have {_LONGEST_UNIX_PATH} bytes at most.")
        return FrontAddress(text, path=rest)
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not _PORT.fullmatch(port) or int(port) > 65535:
            raise _bad(text, f"{port or 'Nothing'} is not a port number.")
        if host != "localhost" and not _is_loopback(host):
            raise _bad(text, f"A front listens on loopback only, and {host or 'no host'} is not loopback.")
        return FrontAddress(text, host=host, port=int(port))
    raise _bad(text, f"It starts with {scheme or 'nothing'!r}.")


def _is_loopback(host: str) -> bool:
    # As an address: a name that begins like one (127.example.org) may lead anywhere.
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def address_problems(text: str) -> list[Problem]:
    """What keeps a front from listening on `text`, for a launch plan; empty when nothing does."""
    try:
        parse_address(text)
    except EngineError as error:
        return [Problem("address", text, f"{error.what} {error.why}", error.fix)]
    return []


def key_for(address: FrontAddress, given: bytes | None) -> bytes | None:
    """The key to use: the given one, else that of the environment for `tcp:`, else none.

    Raises:
        EngineError: a `tcp:` address without a key, since any user of the machine can reach its port.
    """
    if given is not None:
        return given
    if address.path:
        return None
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise EngineError(
            f"{address.text} needs a key and there is none.",
            "Every user of this machine can reach a tcp port, also on loopback.",
            f"Set {KEY_VARIABLE} to the same secret on both sides, or use unix:/path.",
        )
    return key.encode()


def prepare_socket_folder(address: FrontAddress) -> None:
    """Makes the folder of a unix socket (0700) and removes a socket that nobody listens on.

    Raises:
        EngineError: the folder is not the caller's alone, something else than a socket has the path, or
            another front is alive on the address.
    """
    path = Path(address.path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & 0o077:
        raise EngineError(
            f"A front cannot listen in {path.parent}.",
            f"Its mode is {stat.S_IMODE(folder.st_mode):04o} and its owner {folder.st_uid}, so that others "
            "could connect to the engine.",
            f"Use a folder of your own with mode 0700 (the front makes it when it is missing): chmod 700 "
            f"{path.parent}",
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):  # connecting to a file is refused as well, like to a dead front
        raise EngineError(
            f"A front cannot listen on {address.text}.",
            "Something else than a socket has that path already, and is left as it is.",
            "Choose a path that is free.",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            path.unlink()  # left behind by a front that was killed
            return
        except OSError as error:
            raise EngineError(f"{path} exists and cannot be probed: {error}.") from error
    raise EngineError(
        f"Another front already listens on {address.text}.", fix="Stop it, or choose another address."
    )


def require_own_front(sock: socket.socket, address: FrontAddress) -> None:
    """Looks who listens on a unix socket: this user, or root. Root itself may talk to anybody's.

    A front listens in a folder of its user alone, but a path below one that all may write to (`/tmp`) can be
    taken by somebody else before it, and weights would go to them.

    Raises:
        EngineError: it is another user's.
    """
    if not address.path or not hasattr(socket, "SO_PEERCRED"):
        return
    _, owner, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if os.getuid() not in (0, owner) and owner != 0:
        raise EngineError(
            f"The front {address.text} is another user's.",
            f"User {owner} listens there, and this process, user {os.getuid()}, would send weights to them.",
            "Run trainer and engine as the same user, and use a folder that is yours alone.",
        )


def _bad(text: str, why: str) -> EngineError:
    return EngineError(
        f"{text!r} is not the address of a front.", why, "Use unix:/absolute/path or tcp:127.0.0.1:port."
    )
