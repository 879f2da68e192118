"""A replica that was started anew is traced anew; one whose loader places elements otherwise is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from packing_engine import FakePackingEngine
from planning_rig import FakeRegistry, exported, opened, request_for

from weightlane.errors import PlanError
from weightlane.planning import make_plan, map_replicas
from weightlane.rejoin import PlanBasis

if TYPE_CHECKING:
    from weightlane.plan import LanePlan


class FakeOtherOrder(FakePackingEngine):
    """Packs k before q, as another release might."""

    def load(self, tensors: Any) -> None:
        order = {"q_proj.weight": "k_proj.weight", "k_proj.weight": "q_proj.weight"}
        super().load((order.get(name, name), tensor) for name, tensor in tensors)


def connected(replicas: int = 1) -> tuple[PlanBasis, LanePlan]:
    registry: Any = FakeRegistry()
    request, parts = request_for(replicas), (exported(),)
    opens = [opened([FakePackingEngine()], number) for number in range(replicas)]
    mapped = map_replicas(registry, request, parts, opens)
    return PlanBasis(registry, request, parts, mapped), make_plan(registry, request, parts, mapped)


def restart(basis: PlanBasis, engine: FakePackingEngine) -> FakePackingEngine:
    endpoint: Any = basis.replicas[0].endpoint
    engine.incarnation = "second"
    endpoint.start_anew([engine])
    return engine


def test_the_same_engine_again_is_traced_and_fits() -> None:
    basis, plan = connected()
    engine = restart(basis, FakePackingEngine())
    again = basis.reopen(0)
    basis.require_same_plan(plan, [again])
    assert engine.traces == 1
    assert again.workers[0].incarnation == "second"


def test_another_table_for_the_same_plan_is_refused_in_words() -> None:
    basis, plan = connected()
    restart(basis, FakeOtherOrder())
    with pytest.raises(PlanError, match="its loaders place elements otherwise") as caught:
        basis.require_same_plan(plan, [basis.reopen(0)])
    (problem,) = caught.value.problems
    assert problem.kind == "rejoin"
    assert plan.replicas[0].trace
    assert plan.replicas[0].trace.digests[0] in problem.what


def test_a_loader_that_now_drops_a_tensor_is_refused_with_what_it_drops() -> None:
    basis, plan = connected()
    engine = restart(basis, FakePackingEngine())
    engine.ignores = {"norm.weight"}
    with pytest.raises(PlanError) as caught:
        basis.require_same_plan(plan, [basis.reopen(0)])
    assert [problem.kind for problem in caught.value.problems] == ["rejoin", "unconsumed", "uncovered"]


def test_an_engine_that_can_no_longer_be_traced_is_refused() -> None:
    basis, plan = connected()

    class FakeQuiet:
        def __init__(self) -> None:
            self.inner = FakePackingEngine()
            self.incarnation = "second"

        def __getattr__(self, name: str) -> Any:
            if name in ("trace", "live_tensors"):
                raise AttributeError(name)
            return getattr(self.inner, name)

    restart(basis, FakeQuiet())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="started anew with coverage untraced; the plan was made for proven"):
        basis.require_same_plan(plan, [basis.reopen(0)])


def test_replicas_that_stayed_are_not_asked_again() -> None:
    # One of them may be gone, while another comes back.
    basis, plan = connected(2)
    stayed: Any = basis.replicas[1].endpoint
    stayed.dead = True
    restart(basis, FakePackingEngine())
    basis.require_same_plan(plan, [basis.reopen(0)])


def test_how_long_a_trace_took_is_no_part_of_what_was_decided() -> None:
    _, plan = connected()
    _, again = connected()
    assert plan.replicas[0].trace != again.replicas[0].trace
    assert plan.digest() == again.digest()
