"""A receiver takes a plan only when it holds every tensor once, aligned, inside its buckets and expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from weightlane.buckets import BucketEntry, BucketLayout, lay_out_buckets
from weightlane.messages import ReceivePlan, WireTensor
from weightlane.plan_check import check_against_expected, check_layout
from weightlane.receiver import ExpectedTensor

if TYPE_CHECKING:
    from weightlane.errors import Problem

WIRES = (WireTensor("a", (3,), "uint8"), WireTensor("b", (2,), "float32"), WireTensor("c", (40,), "float32"))


def plan(**fields: Any) -> ReceivePlan:
    good = ReceivePlan("lane-1", "d", "acme", "inline", WIRES, lay_out_buckets(WIRES, bucket_bytes=128))
    return replace(good, **fields)


def bucket(*entries: tuple[int, int, int], index: int = 0, nbytes: int = 384, **fields: Any) -> BucketLayout:
    entry_structs = tuple(BucketEntry(*entry) for entry in entries)
    return BucketLayout(
        **{"index": index, "slot": 0, "nbytes": nbytes, "entries": entry_structs, "last": True} | fields
    )


WHOLE = ((0, 0, 3), (1, 64, 8), (2, 128, 160))


def test_what_the_planner_makes_is_accepted() -> None:
    assert check_layout(plan()) == []
    assert check_layout(plan(buckets=(bucket(*WHOLE),))) == []
    assert check_layout(plan(tensors=(), buckets=lay_out_buckets(()))) == []
    nothing = (WireTensor("n", (0, 4), "int8"), WireTensor("s", (), "bool"))
    assert check_layout(plan(tensors=nothing, buckets=lay_out_buckets(nothing))) == []


BAD_BUCKETS: dict[str, tuple[tuple[BucketLayout, ...], str]] = {
    "none": ((), "nothing could mark the end"),
    "unmarked end": ((bucket(*WHOLE, last=False),), "last is not marked"),
    "end too early": (
        (bucket(*WHOLE[:2]), bucket(WHOLE[2], index=1)),
        "last is not marked",
    ),
    "wrong number": ((bucket(*WHOLE, index=1),), "not numbered in order"),
    "no such slot": ((bucket(*WHOLE, slot=16),), "slot 16 does not exist"),
    "negative slot": ((bucket(*WHOLE, slot=-1),), "slot -1 does not exist"),
    "a tensor missing": ((bucket(*WHOLE[:2]),), "every tensor exactly once"),
    "a tensor twice": ((bucket(*WHOLE, (2, 320, 160), nbytes=512),), "every tensor exactly once"),
    "another order": ((bucket((1, 0, 8), (0, 64, 3), WHOLE[2]),), "in order"),
    "no such tensor": ((bucket(*WHOLE, (3, 320, 4)),), "tensor number 3 does not exist"),
    "negative tensor": ((bucket((-1, 0, 3), *WHOLE[1:]),), "tensor number -1 does not exist"),
    "unaligned": ((bucket((0, 0, 3), (1, 4, 8), WHOLE[2]),), "offset 4 in bucket 0"),
    "negative offset": ((bucket((0, -64, 3), *WHOLE[1:]),), "offset -64"),
    "overlap": ((bucket(*WHOLE[:2], (2, 64, 160)),), "offset 64"),
    "past the end": ((bucket(*WHOLE, nbytes=256),), "offset 128"),
    "wrong size": ((bucket((0, 0, 4), *WHOLE[1:]),), "4 bytes planned, 3 needed"),
    "negative length": ((bucket(*WHOLE, last=False), bucket(index=1, nbytes=-5)), "-5 bytes long"),
}


@pytest.mark.parametrize("kind", BAD_BUCKETS)
def test_bad_buckets(kind: str) -> None:
    buckets, told = BAD_BUCKETS[kind]
    assert any(told in str(problem) for problem in check_layout(plan(buckets=buckets)))


@pytest.mark.requirement("R66")
def test_bad_tensors_are_told_together_with_bad_buckets() -> None:
    tensors = (WIRES[0], replace(WIRES[0], shape=(2,), dtype="float33"), replace(WIRES[2], shape=(-4, -10)))
    found = check_layout(plan(tensors=tensors, buckets=(bucket(*WHOLE, slot=99),)))
    assert {(problem.kind, problem.subject) for problem in found} == {
        ("duplicate-name", "a"),
        ("dtype", "a"),
        ("shape", "c"),
        ("layout", "bucket 0"),
    }
    assert next(problem for problem in found if problem.kind == "dtype").near[0] == "float32"


EXPECTED = (
    ExpectedTensor("model.layers.0.q_proj.weight", (4, 4)),
    ExpectedTensor("model.layers.0.k_proj.weight", (2, 4)),
    ExpectedTensor("model.embed.weight", (9, 4)),
    ExpectedTensor("lm_head.weight", (9, 4), tied_to="model.embed.weight"),
)


def against(**changed: tuple[int, ...] | None) -> dict[tuple[str, str], Problem]:
    shapes = {item.name: item.shape for item in EXPECTED if not item.tied_to} | changed
    wires = [WireTensor(name, shape, "float32") for name, shape in shapes.items() if shape is not None]
    found = check_against_expected(wires, EXPECTED, receiver="acme at unix:/x")
    return {(problem.kind, problem.subject): problem for problem in found}


def test_a_full_export_is_accepted_with_and_without_its_tied_tensor() -> None:
    assert against() == {}
    assert against(**{"lm_head.weight": (9, 4)}) == {}


def test_missing_extra_and_mis_shaped_are_told_at_once_with_the_names_near_them() -> None:
    found = against(
        **{
            "model.layers.0.q_proj.weight": None,
            "layers.0.q_proj.weight": (4, 4),
            "model.layers.0.k_proj.weight": (4, 2),
            "lm_head.weight": (1, 4),
        }
    )
    assert set(found) == {
        ("missing-name", "model.layers.0.q_proj.weight"),
        ("extra-name", "layers.0.q_proj.weight"),
        ("shape", "model.layers.0.k_proj.weight"),
        ("shape", "lm_head.weight"),
    }
    assert found["missing-name", "model.layers.0.q_proj.weight"].near == ("layers.0.q_proj.weight",)
    assert found["extra-name", "layers.0.q_proj.weight"].near[0] == "model.layers.0.q_proj.weight"
    assert "[4, 2], but acme at unix:/x expects [2, 4]" in str(found["shape", "model.layers.0.k_proj.weight"])


def test_a_name_like_nothing_has_no_candidates() -> None:
    assert against(zzz=(1,))["extra-name", "zzz"].near == ()


def test_a_transposed_square_is_not_seen_here() -> None:
    # Said so that nobody believes it: equal shapes are all that a plan can compare.
    assert against(**{"model.layers.0.q_proj.weight": (4, 4)}) == {}
