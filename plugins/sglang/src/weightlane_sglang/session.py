"""The session that SGLang wants around updates of weights since 0.5.21.

It packs weights again at its end, and refuses a second one while it is open. A controller that dies leaves
its session open.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError
from weightlane_sglang.contract import BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE, SELECTOR_FIELD, TARGET_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.facts import EngineFacts
    from weightlane.program import RequestMove
    from weightlane_sglang.http_channel import HttpChannel

_BEGIN = f'{{"{SELECTOR_FIELD}":"{TARGET_MODEL}"}}'.encode()
_SECONDS = 60.0
_ALREADY = "already open"
_OTHERS_SECONDS = 10.0
"""A plan made from beside holds one for as long as its trace takes; a controller that died, for ever."""
_POLL_SECONDS = 0.1


def wants_session(facts: EngineFacts) -> bool:
    """Whether this server takes updates in a session alone."""
    return BEGIN_UPDATE_ROUTE in facts.routes


def is_for_session(move: RequestMove) -> bool:
    """Whether the era that made this move has sessions: its requests name the model that they are for."""
    return SELECTOR_FIELD in msgspec.json.decode(move.body, type=dict[str, msgspec.Raw])


class UpdateSession:
    """The session of one lane's syncs: opened before the first bucket, ended by a call of the program.

    A sync that fails leaves it open, and the next one goes on in it: it writes every tensor anew.
    """

    def __init__(self, channel: HttpChannel) -> None:
        self._channel = channel
        self._open = False

    def ensure_open(self) -> None:
        """Opens it; one that somebody else has open may end first, and is ended when it does not.

        Were it ended at once, whoever holds it would end ours in its place.

        Raises:
            EngineError: the server refuses.
        """
        if self._open:
            return
        deadline = time.monotonic() + _OTHERS_SECONDS
        while not (begun := _begun(self._channel, _SECONDS)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not begun:
            _end(self._channel)
            if not _begun(self._channel, _SECONDS):
                raise EngineError(
                    f"SGLang at {self._channel.url} opens no session for an update of weights.",
                    "Somebody else opened one just after it had been ended here.",
                    "Let one lane at a time sync to a server.",
                )
        self._open = True

    def ended(self) -> None:
        """It was ended, by a call that somebody else makes."""
        self._open = False


@contextmanager
def empty_session(channel: HttpChannel, timeout_seconds: float) -> Iterator[None]:
    """A session for a request that brings no weights; within one that is open already, nothing is done."""
    if not _begun(channel, timeout_seconds):
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(EngineError):  # the first error tells more
            _end(channel)
        raise
    _end(channel)


def _begun(channel: HttpChannel, timeout_seconds: float) -> bool:
    try:
        _post(channel, BEGIN_UPDATE_ROUTE, _BEGIN, timeout_seconds)
    except EngineError as error:
        if _ALREADY in error.what:
            return False
        raise
    return True


def _end(channel: HttpChannel) -> None:
    # With a bound of its own: a session that stays open refuses every later one.
    _post(channel, END_UPDATE_ROUTE, b"{}", _SECONDS)


def _post(channel: HttpChannel, route: str, body: bytes, seconds: float) -> None:
    channel.send("POST", route, timeout_seconds=seconds, body=(body,), length=len(body))
