"""Bounded HTTP requests to one SGLang server, with its own words in every error."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from weightlane.errors import EngineDeadError, EngineError
from weightlane_sglang.beside import Beside
from weightlane_sglang.contract import MODEL_INFO_ROUTE, OPENAPI_ROUTE
from weightlane_sglang.openapi import read_openapi
from weightlane_sglang.payload import EncodedBucket, request_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor
    from typing_extensions import Self

    from weightlane_sglang.payload import PayloadPlace

QUOTED_CHARACTERS = 2000
NOT_FOUND = "with status 404"
"""In the error about a route that the server does not have."""
_LATE = "did not answer"
_CONNECT_SECONDS = 10.0
_ALIVE_SECONDS = 3.0
_LARGEST_ANSWER = 256 << 20


class HttpChannel:
    """Requests to the one server that the user named.

    Proxies and redirects are not followed, so that nothing but the named address is ever spoken to. Each
    request has a connection of its own: a kept one that the server closed meanwhile could not be told from a
    server that died. Safe to use from several threads.

    Args:
        url: `http://` or `https://` address of the server, without a path.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise EngineError(
                f"The address of an SGLang server ({parts.netloc.rpartition('@')[2]}) holds a user or a "
                "password.",
                "Addresses are shown in plans, errors and logs, and SGLang asks for neither.",
                "Give the address without them; what stands in front of it must let this host through.",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"{url!r} is not the address of an SGLang server.",
                "The sglang backend speaks to a running server over HTTP.",
                "Give the server's URL, such as http://127.0.0.1:30000.",
            )
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self._closed = False
        self._last_done = ""
        self._running: set[_Connection] = set()
        self._client = httpx.Client(
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_keepalive_connections=0, max_connections=32),
        )

    def get(self, route: str, *, timeout_seconds: float) -> bytes:
        """The body that the server answers; see `send`."""
        return self.send("GET", route, timeout_seconds=timeout_seconds)

    def send(
        self,
        method: str,
        route: str,
        *,
        timeout_seconds: float,
        body: Iterable[bytes] = (),
        length: int = 0,
    ) -> bytes:
        """One request; gives the body of the answer.

        Args:
            method: HTTP method.
            route: path, with a query where there is one.
            timeout_seconds: bound on the whole request, from connecting to the last byte of the answer.
            body: JSON in pieces, `length` bytes in all; no copy of the whole is made.
            length: bytes of the body; 0 means that there is none.

        Raises:
            EngineDeadError: nobody listens there, or the connection broke, or the server hangs altogether.
            EngineError: the server refused the request, did not answer it in time, or said that it failed.
        """
        request = f"{method} {route}"
        if self._closed:
            raise EngineError(f"The handle on {self.url} is closed, so {request} was not sent.")
        deadline = time.monotonic() + timeout_seconds
        headers = {"Content-Type": "application/json", "Content-Length": str(length)} if length else {}
        connection = _Connection()
        self._running.add(connection)
        try:
            with self._client.stream(
                method,
                self.url + route,
                content=_until(body, deadline) if length else None,
                headers=headers,
                timeout=httpx.Timeout(timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds)),
                extensions={"trace": connection.trace},
            ) as response:
                answer = b"".join(_bounded(response, deadline))
                status = response.status_code
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._dead(request, f"no connection can be made ({_told(error)})") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self._late(request, timeout_seconds) from error
        except (httpx.TransportError, RuntimeError) as error:
            if self._closed:
                raise EngineError(f"{request} to {self.url} was given up: its handle was closed.") from error
            raise self._dead(request, f"the connection broke ({_told(error)})") from error
        finally:
            self._running.discard(connection)
        self._check(request, status, answer)
        self._last_done = request
        return answer

    def described(self, *, timeout_seconds: float) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """(routes, fields) as the server's own description lists them."""
        return read_openapi(self.get(OPENAPI_ROUTE, timeout_seconds=timeout_seconds))

    def send_tensors(
        self,
        route: str,
        tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        place: PayloadPlace,
        body: str,
        timeout_seconds: float,
    ) -> bytes:
        """Posts tensors as pickles in base64, beside the fields of `body`; see `send`."""
        bucket = EncodedBucket(tensors)
        length, pieces = request_body(bucket, field=place.field, copies=place.copies, body=body)
        return self.send("POST", route, timeout_seconds=timeout_seconds, body=pieces, length=length)

    def start(self, route: str, body: bytes, *, timeout_seconds: float) -> Beside[bytes]:
        """Posts from a thread of its own; see `send`."""
        return Beside(
            lambda: self.send("POST", route, timeout_seconds=timeout_seconds, body=(body,), length=len(body))
        )

    def close(self) -> None:
        """Lets go of the server; requests that run in other threads end with an error. Idempotent."""
        self._closed = True
        for connection in tuple(self._running):
            connection.shut_down()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, request: str, status: int, answer: bytes) -> None:
        if not 200 <= status < 300:
            raise EngineError(
                f"SGLang at {self.url} answered {request} with status {status}: {quoted(answer)}",
                "The server refused the request.",
            )
        if failed(answer):
            raise EngineError(
                f"SGLang at {self.url} answered {request} with status {status}, but said that it failed: "
                f"{quoted(answer)}",
                "The server gives success=false.",
            )

    def _dead(self, request: str, how: str) -> EngineDeadError:
        before = f"The last request it answered was {self._last_done}." if self._last_done else ""
        return EngineDeadError(
            f"SGLang at {self.url} is gone: {how} during {request}.",
            before or "It has not answered any request of this handle.",
            "Its log tells why; nearly every exception in SGLang's scheduler ends the whole server.",
        )

    def _late(self, request: str, timeout_seconds: float) -> EngineError:
        what = f"SGLang at {self.url} {_LATE} {request} within {timeout_seconds:.0f} s"
        try:
            self._client.get(self.url + MODEL_INFO_ROUTE, timeout=_ALIVE_SECONDS)
        except (httpx.TransportError, RuntimeError):
            before = f" The last request it answered was {self._last_done}." if self._last_done else ""
            return EngineDeadError(
                f"{what}, nor {MODEL_INFO_ROUTE} since.", f"The server hangs or is gone.{before}"
            )
        return EngineError(f"{what}.", "The server is alive, but busy with it or waiting for something.")


class _Connection:
    """The socket of one running request, for another thread to end: closing would not wake its reader."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Is called by httpcore at each step of the request."""
        if event == "connection.connect_tcp.complete":
            self._socket = info["return_value"].get_extra_info("socket")

    def shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)


def quoted(answer: bytes) -> str:
    """The server's words, at most 2000 characters of them."""
    text = answer[: 4 * QUOTED_CHARACTERS].decode("utf-8", "replace")[:QUOTED_CHARACTERS].strip()
    return text or "(an empty answer)"


def is_late(error: EngineError) -> bool:
    """Whether the server took a request and gave no answer in time."""
    return _LATE in error.what


def failed(answer: bytes) -> bool:
    """Whether a JSON answer says `"success": false`, which SGLang may send with any status."""
    if not answer.lstrip().startswith(b"{"):
        return False
    try:
        return msgspec.json.decode(answer, type=_Outcome).success is False
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False


class _Outcome(msgspec.Struct):
    success: bool | None = None


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _until(pieces: Iterable[bytes], deadline: float) -> Iterator[bytes]:
    for piece in pieces:
        if time.monotonic() > deadline:
            raise TimeoutError
        yield piece


def _bounded(response: httpx.Response, deadline: float) -> Iterator[bytes]:
    size = 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > _LARGEST_ANSWER:
            raise EngineError(
                f"The answer to {response.request.url} is larger than {_LARGEST_ANSWER >> 20} MiB."
            )
        if time.monotonic() > deadline:
            raise TimeoutError
        yield piece
