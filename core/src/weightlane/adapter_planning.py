"""The adapter's part of planning: how each replica's engine takes it, in which form, and under which name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.adapters import trained_base
from weightlane.contexts import ExpressAdapterContext
from weightlane.errors import PlanError, Problem
from weightlane.manifest import TrainedAdapter
from weightlane.peft.features import refused_features
from weightlane.types import Capability

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import AdapterExpression, AdapterForm, SwapPolicy, TrainedBase
    from weightlane.manifest import Manifest
    from weightlane.plan import ReplicaPlan
    from weightlane.planning import OpenReplica, PlanRequest
    from weightlane.registry import Registry


@dataclass(frozen=True, slots=True)
class LaneForm:
    """The manifest in the form in which it travels to every replica, and how each replica's engine takes it.

    Both are as trained, with problems, where an engine refuses or the normal form cannot be made.
    """

    manifest: Manifest
    expressions: dict[int, AdapterExpression]
    problems: tuple[Problem, ...] = ()


def in_one_form(
    registry: Registry, manifest: Manifest, replicas: Sequence[OpenReplica], swap: SwapPolicy
) -> LaneForm:
    """One form for a whole lane: normal as soon as one engine needs that, since all are sent the same bytes.

    Outside mode adapter the manifest stays as it is. Whatever the adapter then asks of an engine that does
    not carry it is a problem.
    """
    form = _expressed(registry, manifest, replicas, "as-trained", swap)
    if form.problems or all(item.form == "as-trained" for item in form.expressions.values()):
        return form
    try:
        normal = _normal(manifest, replicas, tuple(form.expressions.values()))
    except PlanError as refusal:
        return LaneForm(manifest, form.expressions, refusal.problems)
    # Asked again: what the engine reads of a configuration is that of the form which it is sent.
    return _expressed(registry, normal, replicas, "normal", swap)


def _expressed(
    registry: Registry,
    manifest: Manifest,
    replicas: Sequence[OpenReplica],
    form: AdapterForm,
    swap: SwapPolicy,
) -> LaneForm:
    expressions: dict[int, AdapterExpression] = {}
    problems: list[Problem] = []
    for replica in replicas:
        expression, refusals = express_adapter(registry, manifest, replica, swap)
        problems += refusals
        if expression is None or manifest.adapter is None:
            continue
        if form == "normal":
            expression = replace(expression, form=form)
        expressions[replica.number] = expression
        if expression.form == form:
            receiver = f"{replica.facts.engine} at {replica.endpoint.address}"
            problems += refused_features(manifest.adapter.needs, expression.carries, receiver=receiver)
    return LaneForm(manifest, expressions, tuple(problems))


def _normal(
    manifest: Manifest, replicas: Sequence[OpenReplica], expressions: Sequence[AdapterExpression]
) -> Manifest:
    from weightlane.peft.normal_form import normal_form

    if manifest.adapter is None:
        return manifest
    groups = dict.fromkeys(group for expression in expressions for group in expression.groups)
    weights = {
        item.name.removesuffix(".weight"): item.shape
        for replica in replicas
        for item in replica.workers[0].expected
        if item.name.endswith(".weight")
    }
    config, tensors = normal_form(manifest.adapter, manifest.tensors, groups=tuple(groups), weights=weights)
    trained = TrainedAdapter(manifest.adapter, manifest.tensors)
    return replace(manifest, tensors=tensors, adapter=config, trained=trained)


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
