"""What the worker keeps of traces, and which names of a plan it then refuses."""

from __future__ import annotations

from weightlane.contexts import MapNamesContext
from weightlane.facts import no_facts
from weightlane.manifest import Manifest, TensorSpec
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.trace.table import Placement, PlacementTable, TableKey, TracedSource, TracedTarget
from weightlane.types import Phase
from weightlane_vllm.draft_routes import LoadRoutes
from weightlane_vllm.eras import ERAS
from weightlane_vllm.plugin import weightlane_map_names
from weightlane_vllm.traced_names import TracedNames


def table(*pairs: tuple[str, str]) -> PlacementTable:
    """Sources of (canonical, wire) name, each alone in a target of its own."""
    return PlacementTable(
        key=TableKey("vllm", "0.32.0", "A"),
        style="base-layer",
        sources=tuple(TracedSource(canonical, wire, (2,), "float32") for canonical, wire in pairs),
        targets=tuple(
            TracedTarget(f"live.{canonical}", (2,), (1,), "float32", "parameter", number)
            for number, (canonical, _) in enumerate(pairs)
        ),
        placements=tuple(Placement(number, number, 0, 0, ((2, 1, 1),)) for number in range(len(pairs))),
    )


def test_a_name_that_no_trace_was_handed_is_refused_with_the_one_in_its_place() -> None:
    names = TracedNames()
    names.add("one", table(("a.weight", "a.base_layer.weight")), LoadRoutes())
    assert names.targets_of("a.weight") == ("live.a.weight",)
    assert names.unreached(["a.base_layer.weight"], receiver="worker 0") == []
    (problem,) = names.unreached(["a.weight"], receiver="worker 0")
    assert (problem.kind, problem.subject) == ("unreached", "a.weight")
    assert "a.base_layer.weight is what it takes" in problem.what


def test_lanes_with_tensors_of_their_own_add_up_while_the_model_stands() -> None:
    names = TracedNames()
    names.add("one", table(("a", "a")), LoadRoutes())
    names.add("one", table(("b", "b")), LoadRoutes())
    assert names.known("one")
    assert names.unreached(["a", "b"], receiver="worker 0") == []


def test_a_new_model_knows_nothing_of_the_old_ones_traces() -> None:
    names = TracedNames()
    names.add("one", table(("a", "a")), LoadRoutes())
    assert not names.known("two")
    names.add("two", table(("b", "b")), LoadRoutes())
    assert not names.known("one")
    assert [problem.subject for problem in names.unreached(["a"], receiver="worker 0")] == ["a"]


def test_the_map_is_the_traces_where_there_is_one_and_the_static_rules_else() -> None:
    worker = WorkerDescription(
        0,
        1,
        "host",
        1,
        "one",
        live=(LiveTensor("a.weight", (2,), "bfloat16"),),
        expected=(ExpectedTensor("a.weight", (2,)), ExpectedTensor("head.weight", (2,), tied_to="a.weight")),
    )
    specs = tuple(TensorSpec(name, (2,), "float32", (0,)) for name in ("a.weight", "head.weight", "b.weight"))
    manifest = Manifest(Phase.FULL, 1, specs)
    traced = table(("a.weight", "a.base_layer.weight"), ("b.weight", "b.weight"))

    def asked(known: PlacementTable | None) -> list[tuple[str, tuple[str, ...], str]]:
        context = MapNamesContext(ERAS[0], no_facts("vllm"), manifest, worker, known)
        return [(entry.wire, entry.targets, entry.dropped) for entry in weightlane_map_names(context)]

    tied = ("head.weight", (), "the receiver reads a.weight for it")
    assert asked(traced) == [
        ("a.base_layer.weight", ("live.a.weight",), ""),
        tied,
        ("b.weight", ("live.b.weight",), ""),
    ]
    assert asked(None) == [("a.weight", ("a.weight",), ""), tied, ("b.weight", (), "")]


def test_routes_stand_with_the_incarnation_that_they_were_traced_of() -> None:
    names = TracedNames()
    names.add("one", table(("a", "a")), LoadRoutes({"bias": "live.bias"}))
    names.add("one", table(("b", "b")), LoadRoutes())
    assert names.routes("one") == LoadRoutes({"bias": "live.bias"})
    assert names.routes("two") == LoadRoutes()
    names.add("two", table(("a", "a")), LoadRoutes())
    assert names.routes("two") == LoadRoutes()
