"""What a server tells of itself, also where it does not read its scheduler's replies yet.

Before 0.5.10 the process that takes requests begins to read replies at the first request for tokens, and asks
for its own description without beginning to. SGLang's warm-up is such a request; a server started with
`--skip-server-warmup` has had none, and answers `/server_info` with silence.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineDeadError, EngineError
from weightlane_sglang.contract import FLUSH_ROUTE, GENERATE_ROUTE, SERVER_INFO_ROUTES
from weightlane_sglang.http_channel import NOT_FOUND, is_late
from weightlane_sglang.probes import FLUSH_TIMEOUT

if TYPE_CHECKING:
    from weightlane_sglang.channel import Channel

SILENT_SECONDS = 4.0
"""How long a description may take before it is asked why; one that comes takes milliseconds."""

_ONE_TOKEN = msgspec.json.encode({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})


def read_server_info(channel: Channel, *, timeout_seconds: float) -> bytes:
    """The answer to `/server_info`, after one token where the server would not answer before its first.

    Raises:
        EngineError: the server refuses, or does not answer within `timeout_seconds`.
        EngineDeadError: it is gone.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        return one_of(channel, SERVER_INFO_ROUTES, min(SILENT_SECONDS, timeout_seconds))
    except EngineDeadError:
        raise
    except EngineError as error:
        if not is_late(error) or _left(deadline) == 0:
            raise
    # The one that was asked before stands in its queue and is answered with this one.
    if _may_read_no_replies(channel, _left(deadline)):
        try:
            channel.send(
                "POST",
                GENERATE_ROUTE,
                timeout_seconds=_left(deadline),
                body=(_ONE_TOKEN,),
                length=len(_ONE_TOKEN),
            )
        except EngineDeadError:
            raise
        except EngineError as error:
            raise EngineError(
                f"SGLang at {channel.url} tells nothing of itself: {error.what}",
                "Before 0.5.10 it does so only after it generated something, and it gave no token now.",
                "Start it without --skip-server-warmup.",
            ) from error
    return one_of(channel, SERVER_INFO_ROUTES, max(1.0, _left(deadline)))


def one_of(channel: Channel, routes: tuple[str, ...], timeout_seconds: float) -> bytes:
    """The answer of the first of these routes that the server has."""
    *newer, oldest = routes
    for route in newer:
        try:
            return channel.get(route, timeout_seconds=timeout_seconds)
        except EngineError as error:
            if NOT_FOUND not in error.what:
                raise
    return channel.get(oldest, timeout_seconds=timeout_seconds)


def _may_read_no_replies(channel: Channel, timeout_seconds: float) -> bool:
    """Whether it is of that era: both came with 0.5.10, a flush that waits and replies that are read."""
    _, fields = channel.described(timeout_seconds=timeout_seconds)
    return FLUSH_TIMEOUT not in fields.get(FLUSH_ROUTE, ())


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
