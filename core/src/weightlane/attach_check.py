"""Everything that a worker checks of a plan before it takes it, all problems at once; nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.adapter_check import check_adapter_plan
from weightlane.engine_agent import TellsItsBase, released_by, why_not_whole
from weightlane.errors import Problem
from weightlane.plan_check import check_against_expected, check_layout, left_to_the_trace
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.agent_state import Attached, BaseState
    from weightlane.engine_agent import WorkerEngine
    from weightlane.messages import ReceivePlan
    from weightlane.receiver import WorkerDescription


def attach_problems(
    plan: ReceivePlan,
    description: WorkerDescription,
    engine: WorkerEngine,
    base: BaseState,
    attached: Iterable[Attached],
    *,
    receiver: str,
) -> list[Problem]:
    """Problems of the plan in itself, against this worker's checkpoint and other lanes, and its engine's.

    Engines may rely on a well-formed plan: a malformed one is not shown to them.
    """
    from weightlane.packing import unreadable_dtypes

    malformed = check_layout(plan) or unreadable_dtypes(plan.tensors)
    problems: list[Problem] = []
    if plan.phase is not Phase.ADAPTER:
        named = [replace(item, name=plan.canonical.get(item.name, item.name)) for item in plan.tensors]
        found = check_against_expected(named, description.expected, receiver=receiver)
        problems += left_to_the_trace(found, description.beyond)  # the engine knows what it has traced
    elif not base.whole and not _is_sent(plan):
        what = "a sync of full weights left it half-written, and an adapter would be put on that"
        problems.append(Problem("residency", receiver, what, "Sync full weights until it succeeds."))
    problems += _adapter_name_taken(plan, attached, receiver=receiver)
    malformed += check_adapter_plan(plan, description.expected, engine, receiver=receiver)
    if not malformed:
        problems += _with_reason(plan, list(engine.check_plan(plan)))
    return malformed + problems


def _with_reason(plan: ReceivePlan, found: list[Problem]) -> list[Problem]:
    """Beside what is wrong with the base that the engine holds: why the lane does not send its own."""
    reason = plan.adapter.base.not_sent if plan.adapter else ""
    if not reason or not any(problem.kind == "residency" for problem in found):
        return found
    return [*found, Problem("residency", "base", f"the lane cannot send it, because {reason}")]


def _is_sent(plan: ReceivePlan) -> bool:
    """Whether the base under the plan's adapter comes from here too, so that any other may be held now."""
    return plan.adapter is not None and bool(plan.adapter.base.sent_by)


def base_identity(plan: ReceivePlan, engine: WorkerEngine, base: BaseState) -> str:
    """Which base a worker holds, as far as is known once it has taken the plan; "" where nothing is.

    Compared by value whenever a plan tells the values: nobody else is asked what was written by other hands.
    """
    if plan.adapter is not None:
        # `check_plan` of the engine has compared it where no lane could send it.
        return base.identity if plan.adapter.base.sent_by else plan.adapter.base.identity
    if plan.base is None or not plan.base.values or not base.whole or why_not_whole(engine):
        return base.identity
    if not isinstance(engine, TellsItsBase) or released_by(engine):
        return base.identity
    return plan.base.identity if not engine.base_problems(plan.base.values) else ""


def _adapter_name_taken(plan: ReceivePlan, attached: Iterable[Attached], *, receiver: str) -> list[Problem]:
    """Requests name an adapter and nothing else: under one name, two trainers would answer for each other.

    A lane that gives its own plan anew, or follows one whose trainer is gone, may have the name.
    """
    if plan.adapter is None:
        return []
    name = plan.adapter.config.name
    return [
        Problem(
            "adapter-name",
            name,
            f"lane {other.plan.lane} holds an adapter of this name on {receiver}, so lane {plan.lane} cannot "
            "have one: requests for either would be answered by the other",
            "Give the adapter another name (peft's own default is 'default'), or close the other lane first.",
        )
        for other in attached
        if other.plan.adapter is not None
        and other.plan.adapter.config.name == name
        and other.plan.lane != plan.lane
        and not other.abandoned
    ]
