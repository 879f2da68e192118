"""Coverage counts and canonical forms of strided regions, against sets of elements written out one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.trace import coverage, intervals
from weightlane.trace.coverage import coverage_problems, target_coverage
from weightlane.trace.geometry import Region, coalesce, coalesce_joint, extent
from weightlane.trace.intervals import TooFineError, count
from weightlane.trace.table import Placement, PlacementTable, TableKey, TracedSource, TracedTarget

axes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)
regions = st.builds(Region, st.integers(0, 20), axes.map(tuple))
plain = st.builds(lambda first, size: Region(first, ((size, 1),)), st.integers(0, 30), st.integers(0, 12))


def elements(region: Region) -> Counter[int]:
    """How often each element occurs; a repeat by a stride of 0 is none."""
    kept = [(size, stride) for size, stride in region.axes if stride or not size]
    steps = itertools.product(*(range(size) for size, _ in kept))
    return Counter(
        region.offset + sum(n * stride for n, (_, stride) in zip(step, kept, strict=True)) for step in steps
    )


def brute_force(covering: list[Region], within: list[Region]) -> tuple[int, int, int]:
    times: Counter[int] = Counter()
    for region in covering:
        times.update(elements(region))
    wanted = {element for region in within for element in elements(region)}
    found = Counter(min(times[element], 2) for element in wanted)
    return found[1], found[0], found[2]


@settings(max_examples=60)
@given(st.lists(st.one_of(regions, plain), max_size=6), st.lists(regions, max_size=3))
def test_counts_are_those_of_brute_force(covering: list[Region], within: list[Region]) -> None:
    counts = count(covering, within)
    assert (counts.once, counts.never, counts.more) == brute_force(covering, within)


@settings(max_examples=30)
@given(axes, st.integers(0, 20))
def test_the_canonical_form_has_the_same_elements(given_axes: list[tuple[int, int]], offset: int) -> None:
    joined = coalesce(given_axes)
    assert elements(Region(offset, joined)) == elements(Region(offset, tuple(given_axes)))
    assert coalesce(joined) == joined


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_the_joint_form_pairs_the_same_elements(walk: list[tuple[int, int, int]]) -> None:
    def pairs(some: list[tuple[int, int, int]]) -> Counter[tuple[int, int]]:
        steps = itertools.product(*(range(size) for size, _, _ in some))
        return Counter(
            (
                sum(n * source for n, (_, source, _) in zip(step, some, strict=True)),
                sum(n * target for n, (_, _, target) in zip(step, some, strict=True)),
            )
            for step in steps
        )

    joined = coalesce_joint(*zip(*walk, strict=True)) if walk else coalesce_joint((), (), ())
    assert pairs(list(joined)) == pairs(walk)
    assert len(joined) <= len(walk)


def test_the_extent_reaches_from_the_first_to_the_last_element() -> None:
    assert (extent((), ()), extent((2, 0), (1, 1)), extent((3, 4), (4, 1)), extent((3, 4), (1, 3))) == (
        1,
        0,
        12,
        12,
    )


def rows(first: int, size: int, stride: int, width: int) -> Region:
    return Region(first, ((size, stride), (width, 1)))


COVERED = {
    "halves of a row-parallel weight": [rows(0, 1000, 64, 32), rows(32, 1000, 64, 32)],
    "gate and up rows that alternate": [rows(0, 500, 128, 64), rows(64, 500, 128, 64)],
    "columns that alternate": [Region(0, ((1000, 64), (32, 2))), Region(1, ((1000, 64), (32, 2)))],
    "q, k and v": [rows(0, 600, 64, 64), rows(38400, 200, 64, 64), rows(51200, 200, 64, 64)],
    "a thousand experts, backwards": [Region(64 * n, ((64, 1),)) for n in reversed(range(1000))],
    "a transposed tensor": [Region(0, ((64, 1), (1000, 64)))],
    "column by column": [Region(n, ((1000, 64),)) for n in range(64)],
}


@pytest.mark.parametrize("name", COVERED)
def test_layouts_of_engines_cover_a_tensor_once(name: str) -> None:
    whole = Region(0, ((64000, 1),))
    assert count(COVERED[name], [whole]) == intervals.Counts(once=64000, never=0, more=0)
    first, *rest = COVERED[name]
    missing = count(rest, [whole])
    assert (missing.never, missing.more) == (first.elements, 0)
    twice = count([*COVERED[name], first], [whole])
    assert (twice.never, twice.more) == (0, first.elements)


def too_fine() -> PlacementTable:
    """Every second column is written: more runs than are counted, and no second half to join them with."""
    target = TracedTarget("w", (3000, 3000), (3000, 1), "float32", "parameter", 0)
    return PlacementTable(
        TableKey("reference", "1", "Tiny"),
        "plain",
        (TracedSource("a", "a", (3000, 1500), "float32"),),
        (target,),
        (Placement(0, 0, 0, 0, ((3000, 1500, 3000), (1500, 1, 2))),),
    )


def test_more_runs_than_can_be_counted_are_refused_and_told() -> None:
    with pytest.raises(TooFineError, match="4500001 runs"):
        count([Region(0, ((4500000, 2),))], [Region(0, ((9000000, 1),))])
    (found,) = target_coverage(too_fine())
    assert found.too_fine
    assert not found.complete
    (problem,) = coverage_problems([too_fine()], {}, receiver="it")
    assert (problem.kind, problem.subject) == ("uncovered", "w")
    assert "too fine to be counted" in problem.what


def test_a_source_taken_in_too_many_pieces_is_not_called_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_MOST_RUNS", 10)
    table = too_fine()
    (source,) = coverage.source_coverage([table])
    assert source.consumed == source.elements  # each row continues the one before: one run
    picked = (Placement(0, 0, 0, 0, ((20, 2, 1),)), Placement(0, 0, 0, 40, ((20, 3, 1),)))
    pieces = PlacementTable(table.key, "plain", table.sources, table.targets, picked)
    (source,) = coverage.source_coverage([pieces])
    assert source.consumed == 0
