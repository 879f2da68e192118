"""Everything that a worker checks of a plan before it takes it, all problems at once; nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapter_check import check_adapter_plan
from weightlane.errors import Problem
from weightlane.plan_check import check_against_expected, check_layout
from weightlane.types import Phase

if TYPE_CHECKING:
    from weightlane.agent_state import BaseState
    from weightlane.engine_agent import WorkerEngine
    from weightlane.messages import ReceivePlan
    from weightlane.receiver import WorkerDescription


def attach_problems(
    plan: ReceivePlan, description: WorkerDescription, engine: WorkerEngine, base: BaseState, *, receiver: str
) -> list[Problem]:
    """Problems of the plan in itself, against this worker's checkpoint, and those only its engine sees.

    Engines may rely on a well-formed plan: a malformed one is not shown to them.
    """
    from weightlane.packing import unreadable_dtypes

    malformed = check_layout(plan) or unreadable_dtypes(plan.tensors)
    problems: list[Problem] = []
    if plan.phase is not Phase.ADAPTER:
        problems += check_against_expected(plan.tensors, description.expected, receiver=receiver)
    elif not base.whole:
        what = "a sync of full weights left it half-written, and an adapter would be put on that"
        problems.append(Problem("residency", receiver, what, "Sync full weights until it succeeds."))
    malformed += check_adapter_plan(plan, description.expected, engine, receiver=receiver)
    return malformed + problems + ([] if malformed else list(engine.check_plan(plan)))
