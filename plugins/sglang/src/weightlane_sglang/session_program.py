"""The era of update sessions (0.5.21 and later): what differs from the one before.

The endpoint opens the session before the first bucket (`session.UpdateSession`): it must be open in each
sync, also in one after a failed one, which does not pause again. The program ends it once all buckets are
there: caches are flushed and a version is published after the server has packed its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightlane.program import EngineCall
from weightlane_sglang.contract import (
    BEGIN_REQUEST,
    DISTRIBUTED_REQUEST,
    END_UPDATE_ROUTE,
    SELECTOR_FIELD,
    TARGET_MODEL,
    UPDATE_REQUEST,
)
from weightlane_sglang.lifecycle import plan_lifecycle
from weightlane_sglang.requests import build_program, require_fields

if TYPE_CHECKING:
    from weightlane.contexts import BuildRequestsContext
    from weightlane.program import Lifecycle, Program, RequestMove

_END_SECONDS = 120.0  # quantised weights are packed in it


def build_program_in_session(context: BuildRequestsContext) -> Program:
    """As before, and every request names the model that it is for.

    Raises:
        PlanError: the server runs in a way whose weights cannot be written by name.
    """
    program = build_program(context)
    require_fields(context.facts, BEGIN_REQUEST, (SELECTOR_FIELD,))
    move: RequestMove = program.move  # type: ignore[assignment]  # this backend has no other
    request = UPDATE_REQUEST if move.group is None else DISTRIBUTED_REQUEST
    require_fields(context.facts, request, (SELECTOR_FIELD,))
    return msgspec.structs.replace(
        program,
        move=msgspec.structs.replace(
            move, body=_for_target(move.body), last_body=_for_target(move.last_body)
        ),
        notes=(*program.notes, "a session of the server's is open from the first bucket to the last"),
    )


def plan_lifecycle_in_session(context: BuildRequestsContext) -> Lifecycle:
    """As before, and the session ends before the flush."""
    lifecycle = plan_lifecycle(context)
    end = EngineCall(END_UPDATE_ROUTE, timeout_seconds=_END_SECONDS)
    return msgspec.structs.replace(lifecycle, settle=(end, *lifecycle.settle))


def _for_target(body: str) -> str:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, SELECTOR_FIELD: TARGET_MODEL}).decode()
