"""How a replica that was started anew comes back into a lane: opened, planned and compared, never trusted.

Policy is frozen at connect (invariant 4): a replica that would be planned otherwise now is refused, with
every difference named. Nothing here writes to an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import PlanError, Problem
from weightlane.lane_messages import Rejoining
from weightlane.planning import OpenReplica, make_plan, map_replicas, open_replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import RankManifest
    from weightlane.plan import LanePlan, ReplicaPlan
    from weightlane.planning import PlanRequest
    from weightlane.registry import Registry

_SAME = (
    *("engine", "engine_version", "backend", "distribution", "transport", "peers", "gpus", "program"),
    *("adapter", "stamps_version", "coverage"),
)
_FIX = "Restart it with the model, size and version that it had, or close the lane and connect again."


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """What the controller made the plan from, kept so that it can be made again.

    `replicas` are those of the plan as it stands, in its order.
    """

    registry: Registry
    request: PlanRequest
    parts: tuple[RankManifest, ...]
    replicas: tuple[OpenReplica, ...]

    def reopen(self, number: int) -> OpenReplica:
        """The replica as it is now, asked anew. An engine object of this process keeps its handle.

        Raises:
            WeightlaneError: it does not answer, no backend fits it, or it failed when it was asked.
        """
        before = self.replicas[number]
        if self.request.targets[number].handle is not None:
            workers = before.endpoint.describe_workers(before.selected.reference)
            return self._mapped(replace(before, workers=workers, mapped=None))
        opened = open_replica(self.registry, self.request, number)
        try:
            return self._mapped(opened)
        except BaseException:
            opened.endpoint.close()
            raise

    def _mapped(self, replica: OpenReplica) -> OpenReplica:
        # All of them, since an adapter travels to all in one form; the others were mapped before.
        every = self.with_returned((replica,)).replicas
        mapped = map_replicas(self.registry, self.request, self.parts, every)
        return next(item for item in mapped if item.number == replica.number)

    def with_returned(self, returned: Sequence[OpenReplica]) -> PlanBasis:
        """The basis with these replicas in place of those they were."""
        by_number = {replica.number: replica for replica in returned}
        return replace(
            self, replicas=tuple(by_number.get(replica.number, replica) for replica in self.replicas)
        )

    def require_same_plan(self, plan: LanePlan, returned: Sequence[OpenReplica]) -> None:
        """Plans anew with what `returned` say of themselves; raises PlanError unless nothing changes.

        Raises:
            PlanError: the engine that came back holds another model, another number of workers, or would be
                planned otherwise; names every difference.
        """
        heads = [_head(plan.replicas[replica.number]) for replica in returned]
        try:
            again = make_plan(self.registry, self.request, self.parts, self.with_returned(returned).replicas)
        except PlanError as error:
            raise PlanError([*heads, *error.problems], lane=plan.lane) from error
        problems = [
            problem
            for replica in returned
            for problem in _differences(plan.replicas[replica.number], again.replicas[replica.number])
        ]
        if (again.entries, again.tensors, again.buckets) != (plan.entries, plan.tensors, plan.buckets):
            problems.append(
                Problem(
                    "rejoin", plan.lane, "names, dtypes or buckets would be others than those in use", _FIX
                )
            )
        if problems:
            raise PlanError(problems, lane=plan.lane)


def rejoining(returned: Sequence[OpenReplica]) -> tuple[Rejoining, ...]:
    """What every rank is told of the replicas that came back."""
    return tuple(
        Rejoining(replica.number, {worker.worker: worker.incarnation for worker in replica.workers})
        for replica in returned
    )


def plan_with(plan: LanePlan, returned: Sequence[Rejoining]) -> LanePlan:
    """The plan with the incarnations of replicas that came back; its digest stays."""
    incarnations = {item.replica: item.incarnations for item in returned}
    return msgspec.structs.replace(
        plan,
        replicas=tuple(
            msgspec.structs.replace(
                replica, incarnations=incarnations.get(replica.replica, replica.incarnations)
            )
            for replica in plan.replicas
        ),
    )


def _head(replica: ReplicaPlan) -> Problem:
    return Problem(
        "rejoin",
        replica.address,
        f"replica {replica.replica} was started anew since the plan was made, and does not fit it any more; "
        "the other problems say in what",
        _FIX,
    )


def _differences(before: ReplicaPlan, now: ReplicaPlan) -> list[Problem]:
    problems = [
        Problem(
            "rejoin",
            before.address,
            f"replica {before.replica} was started anew with {name} {getattr(now, name)}; the plan was made "
            f"for {getattr(before, name)}",
            _FIX,
        )
        for name in _SAME
        if getattr(before, name) != getattr(now, name)
    ]
    if before.trace and now.trace and before.trace.digests != now.trace.digests:
        problems.append(
            Problem(
                "rejoin",
                before.address,
                f"replica {before.replica} was started anew, and its loaders place elements otherwise: "
                f"{now.trace} (table {', '.join(now.trace.digests)}); the plan was made for {before.trace} "
                f"(table {', '.join(before.trace.digests)})",
                _FIX,
            )
        )
    return problems
