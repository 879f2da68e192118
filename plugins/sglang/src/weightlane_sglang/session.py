"""The session that SGLang wants around updates of weights since 0.5.21.

It packs weights again at its end, and refuses a second one while it is open. A controller that dies leaves
its session open.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError
from weightlane_sglang.contract import BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE, SELECTOR_FIELD, TARGET_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.facts import EngineFacts
    from weightlane.program import RequestMove
    from weightlane_sglang.channel import Channel

_BEGIN = f'{{"{SELECTOR_FIELD}":"{TARGET_MODEL}"}}'.encode()
_SECONDS = 60.0
_ALREADY = "already open"
_OUTSIDE = "must run between"
_NONE_OPEN = "no weight-update session is open"
OTHERS_SECONDS = 10.0
"""A plan made from beside holds one for as long as its trace takes; a controller that died, for ever."""
POLL_SECONDS = 0.1


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

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around one bucket: opens the session where it is not open yet.

        One that somebody else has open may end first, and is ended when it does not. Were it ended at once,
        whoever holds it would end ours in its place.

        Raises:
            EngineError: the server refuses; also where somebody ended the session of this sync.
        """
        self._ensure_open()
        try:
            yield
        except EngineError as error:
            if not is_outside(error):
                raise
            self._open = False
            raise EngineError(
                error.what,
                "The session of this sync was open, and somebody else ended it: another lane, say, that took "
                "it for one that a dead trainer had left.",
                "Let one lane at a time sync to a server; the next sync opens a session anew.",
            ) from error

    def _ensure_open(self) -> None:
        if self._open:
            return
        deadline = time.monotonic() + OTHERS_SECONDS
        while not (opened := begun(self._channel, _SECONDS)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not opened:
            end(self._channel, _SECONDS)
            if not begun(self._channel, _SECONDS):
                raise EngineError(
                    f"SGLang at {self._channel.url} opens no session for an update of weights.",
                    "Somebody else opened one just after it had been ended here.",
                    "Let one lane at a time sync to a server.",
                )
        self._open = True

    def ended(self) -> None:
        """It is ended by a call that somebody else makes; one that fails leaves it to the next `held`."""
        self._open = False


def begun(channel: Channel, seconds: float) -> bool:
    """Opens a session; False where one is open already.

    Raises:
        EngineError: the server refuses for another reason, or does not answer in time.
    """
    try:
        _post(channel, BEGIN_UPDATE_ROUTE, _BEGIN, seconds)
    except EngineError as error:
        if _ALREADY in error.what:
            return False
        raise
    return True


def end(channel: Channel, seconds: float) -> None:
    """Ends the session that is open, whoever opened it; one that ended meanwhile is as good.

    Raises:
        EngineError: the server refuses for another reason, or does not answer in time.
    """
    try:
        _post(channel, END_UPDATE_ROUTE, b"{}", seconds)
    except EngineError as error:
        if _NONE_OPEN not in error.what:
            raise


def is_outside(error: EngineError) -> bool:
    """Whether the server refused an update, before it looked at it, because no session was open."""
    return _OUTSIDE in error.what


def _post(channel: Channel, route: str, body: bytes, seconds: float) -> None:
    channel.send("POST", route, timeout_seconds=seconds, body=(body,), length=len(body))
