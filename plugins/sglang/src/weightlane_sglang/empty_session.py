"""A session around a request that brings no weights, beside lanes that may sync to the same server.

SGLang does not tell whose session is open, and ends it for anyone. Two rules keep apart those that meet
there: a lane leaves somebody's session alone for `OTHERS_SECONDS`, and a question ends its own within that
time or not at all. So no lane loses the session of its sync to a question; only one that has waited for a
first question already could, by a second one.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from weightlane.errors import EngineError
from weightlane_sglang.session import OTHERS_SECONDS, POLL_SECONDS, begun, end, is_outside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane_sglang.channel import Channel

_OWN_SECONDS = 0.8 * OTHERS_SECONDS  # the rest is for the ways of the answer and of the request to end it
_RETRY_SECONDS = OTHERS_SECONDS
_MOST_TO_END_SECONDS = 5.0
_SHARE_TO_END = 0.25


class TimeLeft:
    """What is left of one bound on several requests.

    Args:
        channel: for the address in the error.
        seconds: the bound, from now on.
    """

    def __init__(self, channel: Channel, seconds: float) -> None:
        self._url = channel.url
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def seconds(self) -> float:
        """More than 0.

        Raises:
            EngineError: nothing is left.
        """
        left = self.at_most(self._seconds)
        if left <= 0:
            raise EngineError(
                f"SGLang at {self._url} did not answer our loader's question within {self._seconds:.0f} s.",
                "An update waits for requests in flight, and for the session of another update.",
                "Ask again when the server is idle, or allow more time.",
            )
        return left

    def at_most(self, seconds: float) -> float:
        """`seconds`, or what is left where that is less; 0 where nothing is."""
        return min(seconds, max(0.0, self._deadline - time.monotonic()))


def send_in_session(channel: Channel, send: Callable[[float], None], left: TimeLeft) -> None:
    """Sends within a session that this opens and ends, or within one that somebody else has open.

    Somebody else's may end before the request arrives. The server refuses it then without a look at it, and
    all of this is done anew for as long as a lane waits for a session.

    Args:
        channel: to the server.
        send: makes the request, given its bound in seconds.
        left: bound on all of it.

    Raises:
        EngineError: what `send` raises; or nothing is left; or sessions of others ended before each attempt.
    """
    attempts, began = 1, time.monotonic()
    while True:
        try:
            with _session(channel, left):
                allowed = left.seconds()
                # Part is kept for ending the session.
                send(allowed - min(_MOST_TO_END_SECONDS, _SHARE_TO_END * allowed))
        except EngineError as error:
            if not is_outside(error):
                raise
            if time.monotonic() - began >= _RETRY_SECONDS:
                raise _crowded(channel, attempts) from error
        else:
            return
        attempts += 1
        time.sleep(left.at_most(POLL_SECONDS))


@contextmanager
def _session(channel: Channel, left: TimeLeft) -> Iterator[None]:
    if not begun(channel, left.seconds()):
        yield
        return
    opened = time.monotonic()
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, EngineError) and is_outside(error)):
            with suppress(EngineError):  # the first error tells more
                _end_own(channel, opened, left)
        raise
    _end_own(channel, opened, left)


def _end_own(channel: Channel, opened: float, left: TimeLeft) -> None:
    held = time.monotonic() - opened
    # Past that it may be a lane's already, and nobody can tell. It is left to the next lane, which ends it.
    if held < _OWN_SECONDS:
        end(channel, left.seconds())


def _crowded(channel: Channel, attempts: int) -> EngineError:
    return EngineError(
        f"SGLang at {channel.url} had no session open for a question to our loader, {attempts} times.",
        "It was asked within the session of another controller's update, which ended before the question "
        "arrived, or its own session was ended by one. SGLang has one session and does not tell whose it is.",
        "Find the lane or the plan that uses this server at the same time, and ask again when it is done.",
    )
