"""What a replica that was started anew would be planned with must be what the lane was connected with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from local_engines import engines, held_equal, lane_to, versions_held, weights_of

from weightlane.adapters import AdapterExpression
from weightlane.errors import PlanError
from weightlane.planning import make_plan
from weightlane.program import AgentMove, Program
from weightlane.types import TransportName

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.plan import LanePlan

OTHERWISE: dict[str, Any] = {
    "engine": "acme",
    "engine_version": "9.9",
    "backend": "acme/other@one",
    "distribution": "acme 9.9",
    "transport": TransportName.INLINE,
    "peers": (0, 0),
    "program": Program(AgentMove("inline")),
    "adapter": AdapterExpression(swap="two_slot", wire="{}"),
    "stamps_version": False,
}


def test_whatever_would_be_planned_otherwise_is_refused_by_name(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = engines(model_folder, 1)
    weights = weights_of(model_folder)
    with lane_to(weights, [engine]) as lane:
        lane.sync(version=1)
        (planned,) = lane.plan().replicas
        engine.start_anew()
        for field, value in OTHERWISE.items():
            assert getattr(planned, field) != value, field

            def other_plan(*arguments: Any, changes: dict[str, Any] = {field: value}) -> LanePlan:  # noqa: B006
                plan = make_plan(*arguments)
                replica = msgspec.structs.replace(plan.replicas[0], **changes)
                return msgspec.structs.replace(plan, replicas=(replica,))

            with monkeypatch.context() as patched:
                patched.setattr("weightlane.rejoin.make_plan", other_plan)
                with pytest.raises(PlanError, match=f"started anew with {field} ") as caught:
                    lane.sync(version=2)
            assert [problem.kind for problem in caught.value.problems] == ["rejoin"], field
            assert versions_held([engine]) == [None]
        assert lane.sync(version=3).rejoined == (0,)
        assert held_equal(engine, weights)
