"""The adapter's part of planning: how each replica's engine takes it, and whether they all name it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import trained_base
from weightlane.contexts import ExpressAdapterContext
from weightlane.errors import PlanError, Problem
from weightlane.types import Capability

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import AdapterExpression, SwapPolicy, TrainedBase
    from weightlane.manifest import Manifest
    from weightlane.plan import ReplicaPlan
    from weightlane.planning import OpenReplica, PlanRequest
    from weightlane.registry import Registry


def express_adapter(
    registry: Registry, manifest: Manifest, replica: OpenReplica, swap: SwapPolicy
) -> tuple[AdapterExpression | None, list[Problem]]:
    """What `weightlane_express_adapter` gives for one replica, or its refusals; None outside mode adapter.

    An engine that answers with another policy than `swap` is refused: no policy is chosen in silence.
    """
    if manifest.adapter is None:
        return None, []
    context = ExpressAdapterContext(
        replica.selected.descriptor, replica.facts, manifest.adapter, replica.workers, swap
    )
    try:
        expression = registry.call_express_adapter(replica.selected, context)
    except PlanError as refusal:
        return None, list(refusal.problems)
    if expression.swap == swap:
        return expression, []
    what = f"{replica.endpoint.address} swaps adapters {expression.swap}, and {swap} is asked for"
    fix = f'Connect with swap="{expression.swap}", or use another engine.'
    return None, [Problem("adapter-swap", f"replica {replica.number}", what, fix)]


def base_of_adapter(
    registry: Registry, request: PlanRequest, manifest: Manifest, replicas: Sequence[OpenReplica]
) -> TrainedBase | None:
    """The base that the manifest's adapter belongs to, and whether the lane can send it; None for no adapter.

    It is sent to all replicas or to none: where one cannot take it, all must hold it already.
    """
    if manifest.adapter is None:
        return None
    trainer = registry.backend_named(request.trainer_backend)
    reason = ""
    if trainer is None or Capability.EXPORT_BASE not in trainer.descriptor.capabilities:
        reason = f"trainer backend {request.trainer_backend} cannot export phase base"
    for replica in replicas:
        if Capability.RECEIVE_BASE not in replica.selected.descriptor.capabilities:
            reason = reason or f"backend {replica.selected.reference} cannot receive phase base"
    return trained_base(manifest.base, lane=request.lane, not_sent=reason)


def naming_problems(replicas: Sequence[ReplicaPlan]) -> list[Problem]:
    """Replicas whose swap policies give the served adapter different names: no request could go to all."""
    policies = {replica.replica: replica.adapter.swap for replica in replicas if replica.adapter is not None}
    if len(set(policies.values())) < 2:
        return []
    told = ", ".join(f"replica {number} {swap}" for number, swap in policies.items())
    return [
        Problem(
            "replica-disagreement",
            "adapter swap policy",
            f"it is {told}, so that requests would have to name the adapter differently",
            "Use one lane per kind of replica.",
        )
    ]
