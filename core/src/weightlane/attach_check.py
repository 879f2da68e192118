"""Everything that a worker checks of a plan before it takes it, all problems at once; nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.adapter_check import check_adapter_plan
from weightlane.errors import Problem
from weightlane.plan_check import check_against_expected, check_layout
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
        problems += check_against_expected(named, description.expected, receiver=receiver)
    elif not base.whole:
        what = "a sync of full weights left it half-written, and an adapter would be put on that"
        problems.append(Problem("residency", receiver, what, "Sync full weights until it succeeds."))
    problems += _adapter_name_taken(plan, attached, receiver=receiver)
    malformed += check_adapter_plan(plan, description.expected, engine, receiver=receiver)
    return malformed + problems + ([] if malformed else list(engine.check_plan(plan)))


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
