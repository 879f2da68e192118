"""A channel to SGLang: HTTP to a server, or calls on an `Engine` of this process, by the same routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from weightlane.contexts import RolloutTarget
    from weightlane_sglang.payload import PayloadPlace


class Pending(Protocol):
    """A request that was sent and is not waited for yet."""

    def wait(self, seconds: float) -> bool:
        """Whether it has ended well within `seconds`; raises what it raised."""
        ...


class Channel(Protocol):
    """Bounded requests to one SGLang, with its own words in every error. Safe to use from several threads.

    `url` names it in errors, `host` is where its schedulers can be reached from.
    """

    @property
    def url(self) -> str: ...

    @property
    def host(self) -> str: ...

    def described(self, *, timeout_seconds: float) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """(routes, fields): what is served, and the field names of every request type, as `read_openapi`."""
        ...

    def get(self, route: str, *, timeout_seconds: float) -> bytes:
        """The answer as JSON; see `send`."""
        ...

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
            timeout_seconds: bound on the whole request.
            body: JSON in pieces, `length` bytes in all.
            length: bytes of the body; 0 means that there is none.

        Raises:
            EngineDeadError: SGLang is gone.
            EngineError: it refused the request, did not answer it in time, or said that it failed.
        """
        ...

    def send_tensors(
        self,
        route: str,
        tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        place: PayloadPlace,
        body: str,
        timeout_seconds: float,
    ) -> bytes:
        """One request with tensors, by value, in the fields of `body` and the one that `place` names."""
        ...

    def start(self, route: str, body: bytes, *, timeout_seconds: float) -> Pending:
        """Sends one request that may run for long, and does not wait for it."""
        ...

    def close(self) -> None:
        """Lets go of it; requests that run in other threads end with an error. Idempotent."""
        ...


def open_channel(target: RolloutTarget) -> Channel:
    """To the `Engine` object that the user passed, or to the URL.

    Raises:
        EngineError: the object is no engine of SGLang's, or the address no URL.
    """
    if target.handle is not None:
        from weightlane_sglang.engine_channel import EngineChannel

        return EngineChannel(target.handle)
    from weightlane_sglang.http_channel import HttpChannel

    return HttpChannel(target.address)
