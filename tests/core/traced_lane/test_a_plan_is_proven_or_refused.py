"""A plan knows from each worker's loader where every element lands, or is refused before anything moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from packing_engine import SHAPES, FakePackingEngine
from planning_rig import FakeEndpoint, FakeRegistry, exported, opened, plan_for, request_for, untraced
from torch import nn

from weightlane.agent import WorkerAgent
from weightlane.errors import PlanError, Problem, ProtocolError
from weightlane.messages import AgentReply, Attach, Done, decode, encode
from weightlane.planning import make_plan
from weightlane.trace.table import PlacementTable, TableKey, Untraced
from weightlane.trace.table_check import require_workers

QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def problems_of(*args: Any, **fields: Any) -> tuple[Problem, ...]:
    with pytest.raises(PlanError) as caught:
        plan_for(*args, **fields)
    return caught.value.problems


def kinds(problems: tuple[Problem, ...]) -> list[tuple[str, str]]:
    return [(problem.kind, problem.subject) for problem in problems]


def test_a_plan_is_proven_with_figures() -> None:
    engine = FakePackingEngine()
    plan = plan_for([engine])
    (replica,) = plan.replicas
    assert replica.coverage == "proven"
    assert replica.trace is not None
    assert (replica.trace.targets, replica.trace.elements, replica.trace.padding) == (4, 108, 8)
    assert "coverage proven: 4 tensors of 1 worker, 108 elements, 8 of padding, plain names, tra" in str(plan)
    assert engine.writes == []


def test_where_nothing_can_be_traced_the_plan_says_why() -> None:
    plan = plan_for([untraced(FakePackingEngine())])
    assert plan.replicas[0].coverage == "untraced"
    assert "coverage untraced: Quiet of worker 0 cannot run its loader without data" in str(plan)


def test_the_map_comes_from_the_table_of_each_worker() -> None:
    registry = FakeRegistry()
    plan = plan_for([FakePackingEngine(0, 2), FakePackingEngine(1, 2)], registry=registry)
    assert [table.key.worker for table in registry.tables] == [0, 1]
    entry = next(entry for entry in plan.entries if entry.canonical == "k_proj.weight")
    assert (entry.wire, entry.targets, entry.rule) == ("k_proj.weight", ("qkv_proj",), "traced, plain names")


# -- loaders that lose something ----------------------------------------------------------------------------


def test_a_loader_that_drops_a_tensor_silently_is_refused_before_anything_moves() -> None:
    engine = FakePackingEngine()
    engine.ignores = {"experts.1.up_proj.weight"}
    found = problems_of([engine])
    assert kinds(found) == [("unconsumed", "experts.1.up_proj.weight"), ("uncovered", "experts")]
    assert "16 of its 32 elements would be written by nothing" in str(found[1])
    assert "Leave it out of the export if the engine has no use for it" in found[0].fix
    assert "Export what belongs there under its checkpoint name" in found[1].fix
    assert engine.writes == []


def test_the_same_loader_passes_where_it_is_not_traced() -> None:
    # The control: by names and shapes alone nobody sees it.
    engine = FakePackingEngine()
    engine.ignores = {"experts.1.up_proj.weight"}
    assert plan_for([untraced(engine)]).replicas[0].coverage == "untraced"


def test_q_without_k_and_v_is_refused_with_its_group() -> None:
    part = exported([name for name in SHAPES if name not in QKV[1:]])
    found = problems_of([FakePackingEngine()], part)
    assert kinds(found) == [
        ("missing-name", "k_proj.weight"),
        ("missing-name", "v_proj.weight"),
        ("incomplete-group", "q_proj.weight"),
    ]
    assert "packs it into qkv_proj together with k_proj.weight, v_proj.weight" in str(found[2])


def test_what_other_checks_name_is_not_said_again() -> None:
    names = [name for name in SHAPES if name != "norm.weight"]
    found = problems_of([FakePackingEngine()], exported(names, nrom__weight=((4,), "float32")))
    assert kinds(found) == [("extra-name", "nrom.weight"), ("missing-name", "norm.weight")]
    wrong = exported(names, norm__weight=((5,), "float32"))
    assert kinds(problems_of([FakePackingEngine()], wrong)) == [("shape", "norm.weight")]


def test_a_live_tensor_whose_source_is_left_out_is_told_though_it_has_its_name() -> None:
    engine = FakePackingEngine()
    model: Any = engine.model
    norm = nn.Module()
    norm.register_parameter("weight", model.norm)
    del model.norm
    model.norm = norm
    load = engine.load

    def with_norm(tensors: Any) -> None:
        for name, tensor in tensors:
            if name == "norm.weight":
                norm.weight.copy_(tensor)
            else:
                load([(name, tensor)])

    engine.load = with_norm  # type: ignore[method-assign]
    assert plan_for([engine]).replicas[0].coverage == "proven"
    described = engine.describe()
    tied = tuple(
        structs.replace(item, tied_to="embed.weight") if item.name == "norm.weight" else item
        for item in described.expected
    )
    engine.describe = lambda: structs.replace(described, expected=tied)  # type: ignore[method-assign]
    part = structs.replace(exported(), aliases={"norm.weight": "embed.weight"})
    registry = FakeRegistry()
    registry.drops = {"norm.weight": "tied to embed.weight"}
    found = problems_of([engine], part, registry)
    assert kinds(found) == [("uncovered", "norm.weight")]
    assert "4 of its 4 elements would be written by nothing" in str(found[0])


def test_a_loader_that_raises_is_quoted_and_what_it_never_saw_is_not_blamed() -> None:
    engine = FakePackingEngine()
    engine.load = lambda tensors: {}["model.norm"]  # type: ignore[assignment, method-assign, misc]
    found = problems_of([engine])
    assert kinds(found) == [("trace-error", "loader")]
    assert "KeyError: 'model.norm'" in str(found[0])


def test_a_cast_between_kinds_is_refused() -> None:
    names = [name for name in SHAPES if name != "norm.weight"]
    found = problems_of([FakePackingEngine()], exported(names, norm__weight=((4,), "int32")))
    assert kinds(found) == [("dtype", "norm.weight")]
    assert "casts it to bfloat16 for norm" in str(found[0])


# -- several workers ----------------------------------------------------------------------------------------


def test_shards_that_together_take_everything_are_proven() -> None:
    plan = plan_for([FakePackingEngine(0, 2), FakePackingEngine(1, 2)])
    trace = plan.replicas[0].trace
    assert trace is not None
    assert plan.replicas[0].coverage == "proven"
    assert (len(trace.digests), trace.targets) == (2, 8)


def test_shards_that_do_not_are_refused() -> None:
    class FakeMisplaced(FakePackingEngine):
        """Worker 1, which holds the part of worker 0."""

        def trace(self, tensors: Any) -> PlacementTable:
            table = super().trace(tensors)
            return structs.replace(table, key=structs.replace(table.key, worker=1))

    found = problems_of([FakePackingEngine(0, 2), FakeMisplaced(0, 2)])
    assert ("unconsumed", "q_proj.weight") in kinds(found)
    assert "takes 8 of its 16 elements" in str(found)
    assert ("unconsumed", "norm.weight") not in kinds(found)


@pytest.mark.parametrize("given", [((0, 2), (0, 2)), ((1, 2), (0, 2)), ((0, 1), (1, 1)), ((0, 2),)])
def test_tables_that_are_not_one_for_each_worker_are_no_tables(given: tuple[tuple[int, int], ...]) -> None:
    tables = [
        PlacementTable(TableKey("fake", "1", "Fake", worker, workers), "plain", (), (), ())
        for worker, workers in given
    ]
    with pytest.raises(ProtocolError, match="Each worker writes its own part"):
        require_workers(tables, sender="here")


def test_workers_that_take_other_names_are_one_problem() -> None:
    engines = [FakePackingEngine(0, 2), FakePackingEngine(1, 2)]
    engines[1].suffix = ".base"
    (found,) = problems_of(engines)
    assert found.kind == "map-names"
    assert "worker 0 plain names, worker 1 .base names" in str(found)


# -- names that travel --------------------------------------------------------------------------------------


def test_names_travel_as_the_loader_takes_them_and_are_checked_by_their_own() -> None:
    engine = FakePackingEngine()
    engine.suffix = ".base"
    plan = plan_for([engine], read_back="never")  # the agent below is another one than planning asked
    assert [wire.name for wire in plan.tensors] == [f"{name}.base" for name in SHAPES]
    received = plan.receive_plan(0, ())
    assert received.canonical["norm.weight.base"] == "norm.weight"
    agent = WorkerAgent(lambda backend: engine, origin="worker 0")
    assert isinstance(decode(agent.handle(encode(Attach(received))), AgentReply, sender="it"), Done)


def test_names_that_would_travel_otherwise_than_they_were_traced_are_refused() -> None:
    registry = FakeRegistry(wires={"norm.weight": "norm.gamma"})
    (found,) = problems_of([FakePackingEngine()], registry=registry)
    assert (found.kind, found.subject) == ("map-names", "norm.weight")
    assert "as norm.gamma, but its loader was seen to take norm.weight" in str(found)


def test_what_a_plugin_drops_must_not_be_missed() -> None:
    registry = FakeRegistry()
    registry.drops = {"q_proj.weight": "nobody needs it"}
    found = problems_of([FakePackingEngine()], registry=registry)
    assert ("uncovered", "qkv_proj") in kinds(found)
    assert ("unconsumed", "q_proj.weight") not in kinds(found)


# -- tables that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["sources", "placement"])
def test_a_table_about_something_else_is_no_table(fault: str) -> None:
    class FakeLiar(FakePackingEngine):
        def trace(self, tensors: Any) -> Any:
            table = super().trace(tensors[1:] if fault == "sources" else tensors)
            if fault == "sources":
                return table
            first = structs.replace(table.placements[0], target_offset=1 << 20)
            return structs.replace(table, placements=(first, *table.placements[1:]))

    told = "it says nothing of q_proj.weight" if fault == "sources" else "placement 0 leaves qkv_proj"
    with pytest.raises(ProtocolError, match=told):
        plan_for([FakeLiar()])


def test_an_endpoint_that_traces_by_a_way_of_its_own_is_asked() -> None:
    class FakeTracingEndpoint(FakeEndpoint):
        answer: Any = None

        def trace_workers(self, tensors: Any, timeout_seconds: float) -> Any:
            workers = (FakePackingEngine(0, 2), FakePackingEngine(1, 2))
            return self.answer or tuple(worker.trace(tensors) for worker in workers)

    endpoint: Any = FakeTracingEndpoint([FakePackingEngine()])
    replica = replace(opened([FakePackingEngine()]), endpoint=endpoint)
    registry: Any = FakeRegistry()
    plan = make_plan(registry, request_for(), [exported()], [replica])
    assert plan.replicas[0].coverage == "proven"
    endpoint.answer = Untraced("its loader cannot be replaced")
    plan = make_plan(registry, request_for(), [exported()], [replica])
    assert "coverage untraced: its loader cannot be replaced" in str(plan)
