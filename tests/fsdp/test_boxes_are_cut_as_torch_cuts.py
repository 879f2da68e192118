"""Where each rank's part lies, against torch's own chunks, and in which order a mesh cuts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane_fsdp.boxes import Cut, UnknownOrderError, boxes_of


def ranks_of(mesh: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    places = itertools.product(*(range(size) for size in mesh))
    return {place: rank for rank, place in enumerate(places)}


def cut_by_torch(whole: torch.Tensor, steps: list[tuple[int, int, int]]) -> torch.Tensor:
    """`steps`: dimension, number of chunks, which one; a chunk that torch leaves out is an empty one."""
    for dim, parts, number in steps:
        chunks = whole.chunk(parts, dim)
        whole = chunks[number] if number < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@settings(max_examples=40)
@given(rows=st.integers(0, 9), columns=st.integers(1, 9), first=st.integers(1, 4), second=st.integers(1, 4))
@pytest.mark.parametrize("kind", ["replicas", "two dimensions", "left first", "right first"])
def test_every_part_is_the_chunk_of_its_rank(
    kind: str, rows: int, columns: int, first: int, second: int
) -> None:
    whole = torch.arange(rows * columns).view(rows, columns)
    mesh = (first, second)
    cuts = {
        "replicas": {1: Cut(0)},
        "two dimensions": {0: Cut(0), 1: Cut(1)},
        "left first": {0: Cut(0), 1: Cut(0)},
        "right first": {0: Cut(0, split_factor=second), 1: Cut(0)},
    }[kind]
    at = ranks_of(mesh)
    for place, rank in at.items():
        boxes = boxes_of((rows, columns), mesh, at, cuts, place)
        assert [box.rank for box in boxes] == sorted(box.rank for box in boxes)
        assert len(boxes) == (second if kind == "replicas" else first * second)
        mine = next(box for box in boxes if box.rank == rank)
        by_axis = [(cuts[axis].dim, mesh[axis], place[axis]) for axis in sorted(cuts)]
        if kind == "right first" and second > 1:
            by_axis.reverse()
        (top, left), (height, width) = mine.start, mine.size
        assert torch.equal(whole[top : top + height, left : left + width], cut_by_torch(whole, by_axis))
        assert sum(box.elements for box in boxes) == whole.numel()


def test_the_order_of_cuts_matters() -> None:
    """Read left to right, rows of FSDP over tensor parallelism would be put in each other's places."""
    at = ranks_of((2, 2))
    cuts = {0: Cut(0, split_factor=2), 1: Cut(0)}
    rows = {box.rank: box.start[0] for box in boxes_of((8,), (2, 2), at, cuts, (0, 0))}
    assert rows == {0: 0, 1: 4, 2: 2, 3: 6}
    plain = {0: Cut(0), 1: Cut(0)}
    rows = {box.rank: box.start[0] for box in boxes_of((8,), (2, 2), at, plain, (0, 0))}
    assert rows == {0: 0, 1: 2, 2: 4, 3: 6}


def test_an_order_that_no_mesh_explains_is_refused() -> None:
    with pytest.raises(UnknownOrderError, match="split factor 3"):
        boxes_of((8,), (2, 2), ranks_of((2, 2)), {0: Cut(0, split_factor=3), 1: Cut(0)}, (0, 0))
