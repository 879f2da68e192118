"""Merging the ranks' manifests: one agreed manifest, or all disagreements at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightlane.manifest import Manifest, RankManifest, TensorSpec, merge_rank_manifests
from weightlane.types import Phase

if TYPE_CHECKING:
    from weightlane.errors import Problem


def part(rank: int, *tensors: TensorSpec, world_size: int = 2, **fields: Any) -> RankManifest:
    return RankManifest(
        **{"rank": rank, "world_size": world_size, "phase": Phase.FULL, "tensors": tensors} | fields
    )


def spec(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def agreed(*parts: RankManifest) -> Manifest:
    manifest, problems = merge_rank_manifests(parts)
    assert problems == ()
    assert manifest is not None
    return manifest


def problems_of(*parts: RankManifest) -> list[Problem]:
    manifest, problems = merge_rank_manifests(parts)
    assert manifest is None
    assert problems
    return list(problems)


def test_replicas_give_one_manifest_whatever_order_they_come_in() -> None:
    parts = [part(1, spec("a"), spec("b")), part(0, spec("a"), spec("b"))]
    manifest = agreed(*parts)
    assert manifest == agreed(*reversed(parts))
    assert [(t.name, t.holders) for t in manifest.tensors] == [("a", (0, 1)), ("b", (0, 1))]
    assert not manifest.collective


def test_a_rank_may_walk_its_tensors_in_another_order() -> None:
    assert [t.name for t in agreed(part(0, spec("a"), spec("b")), part(1, spec("b"), spec("a"))).tensors] == [
        "a",
        "b",
    ]


def test_partitioned_ranks_add_up_and_need_collectives() -> None:
    manifest = agreed(
        part(0, spec("a"), replicated=False),
        part(1, spec("b"), spec("a"), replicated=False, aliases={"b": "a"}),
    )
    assert [(t.name, t.holders) for t in manifest.tensors] == [("a", (0, 1)), ("b", (1,))]
    assert manifest.collective
    assert manifest.aliases == {"b": "a"}


def test_a_partitioned_rank_may_hold_nothing() -> None:
    manifest = agreed(part(0, spec("a"), replicated=False), part(1, replicated=False))
    assert manifest.tensors[0].holders == (0,)


@pytest.mark.requirement("R66")
def test_a_name_twice_on_one_rank() -> None:
    (problem,) = problems_of(part(0, spec("a"), spec("a"), world_size=1))
    assert (problem.kind, problem.subject) == ("duplicate-name", "a")


def test_every_disagreement_is_told_at_once() -> None:
    found = problems_of(
        part(0, spec("same"), spec("shape"), spec("dtype"), spec("only 0"), spec("strange", dtype="int4")),
        part(1, spec("same"), spec("shape", (3,)), spec("dtype", dtype="float16"), spec("only 1")),
    )
    assert {(p.kind, p.subject) for p in found} == {
        ("rank-disagreement", "shape"),
        ("rank-disagreement", "dtype"),
        ("rank-disagreement", "only 0"),
        ("rank-disagreement", "only 1"),
        ("dtype", "strange"),
    }
    told = {p.subject: str(p) for p in found}
    assert "rank 1 holds float32[3] but rank 0 holds float32[2]" in told["shape"]
    assert "held by rank 0 but not by rank 1" in told["only 0"]
    assert "partitioned" in told["only 0"]


def test_partitioned_ranks_that_share_a_name_must_agree_on_it() -> None:
    (problem,) = problems_of(part(0, spec("a"), replicated=False), part(1, spec("a", (3,)), replicated=False))
    assert problem.subject == "a"


def test_a_tie_on_one_rank_alone_is_told() -> None:
    # A tied tensor may stay unsent, which would be wrong for the rank where it is another one.
    tied, untied = {"b": "a"}, {}
    (problem,) = problems_of(
        part(0, spec("a"), spec("b"), aliases=untied), part(1, spec("a"), spec("b"), aliases=tied)
    )
    assert (problem.kind, problem.subject) == ("rank-disagreement", "b")
    assert "with a on rank 1 but not on rank 0" in problem.what
    agreed(part(0, spec("a"), spec("b"), aliases=tied), part(1, spec("b"), spec("a"), aliases={"a": "b"}))
    three = (spec("a"), spec("b"), spec("c"))
    agreed(part(0, *three, aliases={"b": "a", "c": "a"}), part(1, *three, aliases={"b": "a", "c": "a"}))
    # Whoever holds one of the two has no say.
    agreed(
        part(0, spec("a"), replicated=False), part(1, spec("a"), spec("b"), replicated=False, aliases=tied)
    )


def test_placements_and_modes_must_be_the_same() -> None:
    assert [p.subject for p in problems_of(part(0), part(1, replicated=False))] == ["rank 1"]
    assert [p.subject for p in problems_of(part(0), part(1, phase=Phase.BASE))] == ["rank 1"]


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (part(0),),
        (part(0), part(0)),
        (part(1), part(2)),
        (part(0), part(1, world_size=3)),
    ],
    ids=["none", "one missing", "twice", "no rank 0", "another size"],
)
def test_ranks_that_are_not_the_ranks_are_refused(parts: tuple[RankManifest, ...]) -> None:
    assert "ranks" in {p.subject for p in problems_of(*parts)}


def test_sizes_of_nothing_and_of_scalars() -> None:
    assert (spec("a", ()).elements, spec("a", ()).nbytes) == (1, 4)
    assert (spec("a", (4, 0)).elements, spec("a", (4, 0)).nbytes) == (0, 0)
    assert (
        agreed(part(0, spec("a", ()), spec("b", (0,)), spec("c", (3,), "bfloat16"), world_size=1)).nbytes
        == 10
    )


def test_digests_tell_manifests_apart_and_survive_the_wire() -> None:
    manifest = agreed(part(0, spec("a"), world_size=1))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    assert again.digest() == manifest.digest()
    assert agreed(part(0, spec("a", (1,)), world_size=1)).digest() != manifest.digest()
