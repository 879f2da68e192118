"""The era before 0.5.10: a flush answers at once, by a refusal where a request runs or waits.

So it is asked until it was done. That is the one request of ours that is sent again: it changes nothing where
it is refused, and nothing more where it was obeyed before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from weightlane.errors import EngineDeadError, EngineError
from weightlane.program import EngineCall
from weightlane_sglang.contract import FLUSH_ROUTE
from weightlane_sglang.lifecycle import FLUSH_IDLE_SECONDS, lifecycle_around

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.contexts import BuildRequestsContext
    from weightlane.program import Lifecycle

_POLL_SECONDS = 0.2
_T = TypeVar("_T")


def plan_lifecycle_with_untimed_flush(context: BuildRequestsContext) -> Lifecycle:
    """As later, with a flush that the handle asks for until it is done.

    Raises:
        PlanError: as `lifecycle.plan_lifecycle`.
    """
    return lifecycle_around(context, EngineCall(FLUSH_ROUTE, timeout_seconds=float(FLUSH_IDLE_SECONDS)))


def is_untimed_flush(call: EngineCall) -> bool:
    """Whether this call is to be sent until it succeeds."""
    return call.route == FLUSH_ROUTE


def until_idle(send: Callable[[float], _T], seconds: float) -> _T:
    """What `send` gives once the server takes the flush; it is given the seconds that are left.

    Raises:
        EngineError: the last refusal, `seconds` after the first attempt; a server that is gone, at once.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return send(max(1.0, deadline - time.monotonic()))
        except EngineDeadError:
            raise
        except EngineError:
            if time.monotonic() + _POLL_SECONDS > deadline:
                raise
        time.sleep(_POLL_SECONDS)
