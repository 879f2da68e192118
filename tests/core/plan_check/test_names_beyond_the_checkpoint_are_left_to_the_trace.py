"""A receiver with a drafter takes tensors that its model's checkpoint does not have: a trace tells which."""

from __future__ import annotations

from weightlane.manifest import Manifest, TensorSpec
from weightlane.messages import WireTensor
from weightlane.plan_check import check_against_expected, left_to_the_trace
from weightlane.receiver import BeyondExpected, ExpectedTensor
from weightlane.trace.asking import sources_to_trace
from weightlane.types import Phase

EXPECTED = (
    ExpectedTensor("a", (2,), "float32"),
    ExpectedTensor("head", (2,), "float32", tied_to="a"),
    ExpectedTensor("b", (3,), "float32"),
)
BEYOND = BeyondExpected("the mtp drafter", "draft.", "Export it.")


def manifest(**shapes: tuple[int, ...]) -> Manifest:
    specs = tuple(TensorSpec(name, shape, "float32", (0,)) for name, shape in shapes.items())
    return Manifest(Phase.FULL, 1, specs)


def test_they_are_traced_in_the_shape_that_is_exported() -> None:
    exported = manifest(a=(9,), head=(2,), mtp=(4, 5))
    known = [WireTensor("a", (2,), "float32"), WireTensor("b", (3,), "float32")]
    assert [*sources_to_trace(exported, EXPECTED)] == known
    more = WireTensor("mtp", (4, 5), "float32")
    assert [*sources_to_trace(exported, EXPECTED, BEYOND)] == [known[0], more, known[1]]


def test_names_alone_refuse_them_where_nobody_takes_more() -> None:
    sent = [WireTensor(name, shape, "float32") for name, shape in (("a", (9,)), ("b", (3,)), ("mtp", (4,)))]
    found = check_against_expected(sent, EXPECTED, receiver="vllm")
    assert [problem.kind for problem in left_to_the_trace(found, None)] == ["shape", "extra-name"]
    assert [problem.kind for problem in left_to_the_trace(found, BEYOND)] == ["shape"]
