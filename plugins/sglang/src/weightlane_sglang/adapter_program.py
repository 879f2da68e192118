"""The program of mode adapter, in every era: LoRA needs no session, also where base weights do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem
from weightlane.program import AdapterMove, Lifecycle, Program
from weightlane_sglang.adapter_contract import (
    ADAPTER_FIELDS_USED,
    ADAPTER_ROUTES_USED,
    LOAD_ROUTE,
    UNLOAD_REQUEST,
    load_shape,
)
from weightlane_sglang.contract import PAUSE_REQUEST
from weightlane_sglang.lifecycle import plan_lifecycle
from weightlane_sglang.requests import launch_problems, require_fields

if TYPE_CHECKING:
    from weightlane.contexts import BuildRequestsContext

_LOAD_SECONDS = 120.0


def build_adapter_program(context: BuildRequestsContext) -> Program:
    """One `/load_lora_adapter_from_tensors` a sync, with the whole adapter.

    Raises:
        PlanError: the server has no such request, one of an unknown shape, or runs in a way in which it takes
            no adapters.
    """
    facts = context.facts
    problems = list(launch_problems(context))
    problems += [
        Problem("capability", route, f"SGLang {facts.version} has no such route", "Use 0.5.8 or newer.")
        for route in ADAPTER_ROUTES_USED
        if route not in facts.routes
    ]
    if problems:
        raise PlanError(problems)
    shape = load_shape(facts)
    require_fields(facts, UNLOAD_REQUEST, ADAPTER_FIELDS_USED[UNLOAD_REQUEST])
    require_fields(facts, PAUSE_REQUEST, ("mode",))
    times = f"{shape.copies} times, once per tensor-parallel rank" if shape.copies else "once"
    return Program(
        move=AdapterMove(
            route=LOAD_ROUTE,
            payload_field=shape.payload_field,
            copies=shape.copies,
            body="{}",
            timeout_seconds=_LOAD_SECONDS,
        ),
        notes=(f"the adapter travels {times}, by value, in one request",),
    )


def plan_adapter_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    """With two slots nothing is held back and no cache is emptied: SGLang keys it by each load's own id.

    Under one name the server pauses by abort, is flushed once it is idle, and goes on when published.
    """
    if context.swap == "paused":
        return plan_lifecycle(context)
    return Lifecycle(
        notes=("requests keep the adapter that they name; the sync after the next waits for their end",),
        requests="drain",
    )
