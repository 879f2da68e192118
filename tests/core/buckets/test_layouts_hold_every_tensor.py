"""Layouts place every tensor once, in order, aligned for its dtype, and always have an end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.buckets import ALIGNMENT, MOST_SLOTS, aligned, lay_out_buckets, slot_sizes, wire_nbytes
from weightlane.errors import PlanError
from weightlane.manifest import DTYPE_BYTES
from weightlane.messages import ReceivePlan, WireTensor
from weightlane.plan_check import check_layout

tensors = st.lists(
    st.builds(
        WireTensor,
        name=st.text(max_size=3),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    ),
    max_size=12,
)


@pytest.mark.requirement("R59")
@pytest.mark.requirement("R62")
@settings(max_examples=150)
@given(tensors, st.integers(1, 700), st.integers(1, 4))
def test_every_tensor_has_its_own_aligned_bytes_in_plan_order(
    wires: list[WireTensor], bucket_bytes: int, slots: int
) -> None:
    layouts = lay_out_buckets(wires, bucket_bytes=bucket_bytes, slots=slots)
    assert [entry.tensor for layout in layouts for entry in layout.entries] == list(range(len(wires)))
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    assert [layout.last for layout in layouts] == [False] * (len(layouts) - 1) + [True]
    sizes = slot_sizes(layouts)
    for layout in layouts:
        oversize = len(layout.entries) == 1 and layout.entries[0].nbytes > bucket_bytes - ALIGNMENT
        assert (layout.slot == slots) <= oversize
        assert layout.nbytes <= bucket_bytes or oversize
        assert layout.nbytes <= sizes[layout.slot]
        end = 0
        for entry in layout.entries:
            assert entry.offset % ALIGNMENT == 0
            assert entry.offset >= end
            assert entry.nbytes == wire_nbytes(wires[entry.tensor])
            end = entry.offset + entry.nbytes
        assert end <= layout.nbytes
    assert all(size % ALIGNMENT == 0 for size in sizes)
    named = [WireTensor(str(number), wire.shape, wire.dtype) for number, wire in enumerate(wires)]
    assert check_layout(ReceivePlan("lane", "digest", "acme", "shm", tuple(named), layouts)) == []


@pytest.mark.requirement("R62")
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_alignment_is_a_multiple_of_every_dtype(dtype: str) -> None:
    assert ALIGNMENT % DTYPE_BYTES[dtype] == 0
    _, entry = lay_out_buckets([WireTensor("odd", (3,), "uint8"), WireTensor("w", (2,), dtype)])[0].entries
    assert entry.offset % DTYPE_BYTES[dtype] == 0


def test_packing_back_to_back_would_not_be_aligned() -> None:
    # The control of the test above: without rounding, the float would start at byte 3.
    odd = wire_nbytes(WireTensor("odd", (3,), "uint8"))
    assert odd % DTYPE_BYTES["float32"] != 0
    assert aligned(odd) == ALIGNMENT


@pytest.mark.requirement("R59")
def test_nothing_to_send_is_one_empty_last_bucket() -> None:
    (layout,) = lay_out_buckets([])
    assert (layout.entries, layout.nbytes, layout.last) == ((), 0, True)
    assert slot_sizes([layout]) == (ALIGNMENT,)


@pytest.mark.requirement("R60")
def test_a_tensor_above_the_bucket_travels_alone_in_the_extra_slot() -> None:
    wires = [WireTensor(name, (size,), "uint8") for name, size in (("a", 64), ("big", 200), ("b", 64))]
    layouts = lay_out_buckets(wires, bucket_bytes=128, slots=2)
    assert [[entry.tensor for entry in layout.entries] for layout in layouts] == [[0], [1], [2]]
    assert [layout.slot for layout in layouts] == [0, 2, 1]
    assert layouts[1].nbytes == aligned(200)
    assert slot_sizes(layouts) == (64, 64, 256)


def test_a_tensor_of_exactly_the_bucket_is_not_oversize() -> None:
    layouts = lay_out_buckets([WireTensor("a", (128,), "uint8")], bucket_bytes=128)
    assert [layout.slot for layout in layouts] == [0]


def test_a_bucket_is_never_longer_than_its_bound_that_is_not_a_multiple_of_the_alignment() -> None:
    layouts = lay_out_buckets([WireTensor("a", (100,), "uint8")] * 3, bucket_bytes=130)
    assert all(layout.nbytes <= 130 for layout in layouts)


@pytest.mark.parametrize("bucket_bytes", [1, ALIGNMENT - 1])
def test_below_the_alignment_every_tensor_that_has_bytes_travels_alone(bucket_bytes: int) -> None:
    wires = [WireTensor(str(size), (size,), "uint8") for size in (1, 0, 70, 0)]
    layouts = lay_out_buckets(wires, bucket_bytes=bucket_bytes)
    assert [[entry.tensor for entry in layout.entries] for layout in layouts] == [[0], [1], [2], [3]]
    assert [layout.nbytes for layout in layouts] == [64, 0, 128, 0]
    assert (layouts[-1].last, layouts[-1].nbytes) == (True, 0)


@pytest.mark.parametrize("bucket_bytes", [0, -1, -(1 << 70)])
def test_a_bound_that_holds_nothing_is_a_plan_error(bucket_bytes: int) -> None:
    with pytest.raises(PlanError, match=rf"bucket_bytes: must be positive, not {bucket_bytes}"):
        lay_out_buckets([], bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("slots", [0, MOST_SLOTS])
def test_more_slots_than_a_ring_has_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="slots must be 1 to 15"):
        lay_out_buckets([], slots=slots)


def test_sizes_beyond_what_a_float_counts_are_still_exact() -> None:
    nbytes = (1 << 60) + 1
    assert aligned(nbytes) == nbytes + ALIGNMENT - 1
    # The control: rounding up by way of a float loses the one byte, and the tensor would not fit.
    assert math.ceil(nbytes / ALIGNMENT) * ALIGNMENT < nbytes
    (layout,) = lay_out_buckets([WireTensor("huge", (nbytes,), "uint8")])
    assert layout.nbytes >= nbytes


def test_a_hundred_thousand_names_are_laid_out_once_each() -> None:
    wires = [WireTensor(f"layers.{number}.weight", (number % 7,), "bfloat16") for number in range(100_000)]
    layouts = lay_out_buckets(wires, bucket_bytes=4096)
    assert [entry.tensor for layout in layouts for entry in layout.entries] == list(range(100_000))
    plan = ReceivePlan("lane", "digest", "acme", "inline", tuple(wires), layouts)
    assert check_layout(plan) == []
