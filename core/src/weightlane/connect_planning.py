"""What the controller plans from at connect: what every rank exports, and what the user asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem, WeightlaneError
from weightlane.lane_messages import Joined
from weightlane.planning import PlanRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.control import ControlChannel
    from weightlane.plan import LanePlan
    from weightlane.registry import Selected
    from weightlane.wishes import Wishes


def plan_request(wishes: Wishes, selected: Selected | None, above: LanePlan | None) -> PlanRequest:
    """What planning needs of the user's wishes.

    Args:
        wishes: of the controller.
        selected: its trainer's backend; None where that could not be selected, which ends planning.
        above: the plan of the adapter, where the base under it is planned.
    """
    return PlanRequest(
        lane=wishes.lane,
        mode=wishes.mode,
        verify=wishes.verify,
        bucket_bytes=wishes.bucket_bytes,
        transport=wishes.transport,
        trainer_backend=selected.reference if selected else wishes.trainer.engine,
        targets=tuple(spec.target for spec in wishes.replicas),
        pins=tuple(spec.plugin for spec in wishes.replicas),
        open_seconds=wishes.bounds.connect,
        folder=wishes.folder,
        missing_replicas=wishes.missing_replicas,
        release=wishes.release,
        read_back=wishes.read_back,
        swap=wishes.swap,
        requests=wishes.requests,
        drain_seconds=wishes.bounds.drain,
        trained_on=above.trained_on if above else None,
        trainer_options=wishes.trainer.options_for(selected.descriptor) if selected else {},
    )


def gather_joined(
    channel: ControlChannel, keys: str, arguments: Mapping[str, str], *, seconds: float, lane: str
) -> list[Joined]:
    """Every rank's manifest, once each was given the same arguments.

    Args:
        channel: the controller's end.
        keys: what the names of this connect begin with.
        arguments: the controller's own.
        seconds: bound on the wait for each rank.
        lane: for messages.

    Raises:
        WeightlaneError: a rank failed; failures of several ranks become one error that names each.
        PlanError: ranks were given different arguments.
    """
    joined: list[Joined] = []
    failures: list[WeightlaneError] = []
    everyone = range(channel.world_size)
    for rank in everyone:
        try:
            joined.append(channel.get(f"{keys}/join/{rank}", Joined, seconds=seconds, awaited=everyone))
        except WeightlaneError as error:
            failures.append(error)
    if failures and len({error.reason for error in failures}) == 1:
        raise failures[0]
    if failures:
        problems = [Problem("export", f"failure {n}", str(error)) for n, error in enumerate(failures, 1)]
        raise PlanError(problems, lane=lane)
    _require_same_arguments(joined, arguments, lane)
    return joined


def _require_same_arguments(joined: Sequence[Joined], arguments: Mapping[str, str], lane: str) -> None:
    problems = [
        Problem(
            "rank-disagreement",
            name,
            f"rank {item.place.rank} was given {name}={item.arguments.get(name)}, rank 0 {name}={value}",
            "Call connect with the same arguments on every rank.",
        )
        for item in joined
        for name, value in arguments.items()
        if item.arguments.get(name) != value
    ]
    if problems:
        raise PlanError(problems, lane=lane)
