"""An engine with a drafter, whose tensors no checkpoint class tells: a trace proves or refuses each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs
from packing_engine import FakePackingEngine
from planning_rig import exported, plan_for, untraced
from torch import nn

from weightlane.errors import PlanError
from weightlane.receiver import BeyondExpected, WorkerDescription

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


BEYOND = BeyondExpected("the drafter", "draft.", "Export it as well.")
FC = {"mtp__fc": ((3, 2), "float32")}


class FakeDraftingEngine(FakePackingEngine):
    """Beside the packed model one that drafts, with a tensor of its own that is called `mtp.fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.model.draft = nn.Linear(2, 3, bias=False).requires_grad_(requires_grad=False)

    def describe(self) -> WorkerDescription:
        return structs.replace(super().describe(), beyond=BEYOND)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "mtp.fc":
                self.model.draft.get_parameter("weight").copy_(tensor)
            elif not name.startswith("mtp."):
                super().load([(name, tensor)])


def problems_of(engine: Any, **other: tuple[tuple[int, ...], str]) -> list[tuple[str, str]]:
    with pytest.raises(PlanError) as caught:
        plan_for([engine], exported(**other))
    return [(problem.kind, problem.subject) for problem in caught.value.problems]


def test_they_are_proven_where_the_trace_saw_them_taken() -> None:
    engine = FakeDraftingEngine()
    plan = plan_for([engine], exported(**FC))
    assert plan.replicas[0].coverage == "proven"
    (entry,) = [entry for entry in plan.entries if entry.canonical == "mtp.fc"]
    assert entry.targets == ("draft.weight",)


def test_those_that_are_not_exported_are_named_with_who_holds_them() -> None:
    assert problems_of(FakeDraftingEngine()) == [("uncovered", "draft.weight"), ("uncovered", BEYOND.taker)]


def test_a_gap_of_the_model_itself_says_nothing_of_the_drafter() -> None:
    engine = FakeDraftingEngine()
    engine.ignores = {"norm.weight"}
    assert problems_of(engine, **FC) == [("unconsumed", "norm.weight"), ("uncovered", "norm")]


def test_one_that_nobody_takes_is_told_by_name() -> None:
    found = problems_of(FakeDraftingEngine(), **FC, mtp__unheard_of=((1,), "float32"))
    assert found == [("unconsumed", "mtp.unheard_of")]


def test_without_a_drafter_and_without_a_trace_names_decide() -> None:
    assert problems_of(FakePackingEngine(), **FC) == [("extra-name", "mtp.fc")]
    assert problems_of(untraced(FakeDraftingEngine()), **FC) == [("extra-name", "mtp.fc")]
