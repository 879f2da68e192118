"""Properties over tensors of every dtype and form, found by hypothesis."""

from __future__ import annotations

import pytest
import torch
from any_tensors import (
    FORMS,
    bytes_of,
    in_form,
    known_here,
    numbered,
    send,
    some_tensors,
    tensor_of,
    wires_of,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from weightlane.buckets import lay_out_buckets
from weightlane.packing import WireDigest, dtype_name, memory_of, pack_bucket, unpack_bucket
from weightlane.transports.sink import cast_for_wire

# torch warns once a process of complex32 as such, wherever the first one is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@settings(max_examples=150)
@given(some_tensors, st.integers(1, 400), st.integers(1, 4), st.sampled_from([0, 0xAA, 0xFF]))
def test_what_arrives_is_what_was_sent(
    tensors: dict[str, Tensor], bucket_bytes: int, slots: int, padding: int
) -> None:
    arrived, sent, received = send(tensors, bucket_bytes=bucket_bytes, slots=slots, padding=padding)
    assert [name for name, _ in arrived] == list(tensors)
    for name, tensor in arrived:
        wanted = tensors[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        assert bytes_of(tensor) == bytes_of(wanted)
    assert sent == received
    # By value, in requests of the engine's own, the same digest comes about without buckets.
    by_value = WireDigest(wires_of(tensors))
    for wire, tensor in zip(wires_of(tensors), tensors.values(), strict=True):
        by_value.update_whole(memory_of(cast_for_wire(tensor, wire)))
    assert by_value.hexdigest() == sent


@settings(max_examples=60)
@given(some_tensors, st.integers(1, 400))
def test_packing_writes_every_tensors_bytes_once_and_nothing_else(
    tensors: dict[str, Tensor], bucket_bytes: int
) -> None:
    wires = wires_of(tensors)
    for layout in lay_out_buckets(wires, bucket_bytes=bucket_bytes):
        covered = torch.zeros(layout.nbytes, dtype=torch.int32)
        for entry in layout.entries:
            covered[entry.offset : entry.offset + entry.nbytes] += 1
        assert not bool((covered > 1).any())
        for fill in (0x00, 0xFF):
            bucket = torch.full((layout.nbytes,), fill, dtype=torch.uint8)
            pack_bucket(bucket, layout, wires, numbered(layout, tensors))
            assert bool((bucket[covered == 0] == fill).all())


@settings(max_examples=100)
@given(some_tensors, st.data())
def test_one_changed_bit_changes_the_digest(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    whole = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()}
    full = [name for name, tensor in whole.items() if tensor.numel()]
    assume(full)
    _, before, _ = send(whole, bucket_bytes=256)
    name = data.draw(st.sampled_from(full))
    raw = whole[name].contiguous().reshape(-1).view(torch.uint8).clone()
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
    whole[name] = raw.view(whole[name].dtype).reshape(whole[name].shape)
    _, after, _ = send(whole, bucket_bytes=256)
    assert after != before


@pytest.mark.parametrize("change", ["name", "order", "dtype", "shape", "cut"])
def test_the_same_bytes_as_other_tensors_have_another_digest(change: str) -> None:
    wires = wires_of({"a": torch.zeros(2, 2), "b": torch.zeros(4)})
    others = {
        "name": (replace(wires[0], name="c"), wires[1]),
        "order": (wires[1], wires[0]),
        "dtype": (replace(wires[0], dtype="int32"), wires[1]),
        "shape": (replace(wires[0], shape=(4, 1)), wires[1]),
        "cut": (replace(wires[0], shape=(1, 2)), replace(wires[1], shape=(6,))),
    }[change]
    digests = []
    for side in (wires, others):
        digest = WireDigest(side)
        digest.update_whole(memoryview(bytes(32)))
        digests.append(digest.hexdigest())
    assert digests[0] != digests[1]


@pytest.mark.requirement("R62")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", known_here())
def test_every_dtype_in_every_form_after_an_odd_length(dtype: str, form: str) -> None:
    tensors = {
        "odd": tensor_of("uint8", (3,), 0),
        "it": in_form(form, dtype, (3, 2), 1),
        "scalar": in_form(form, dtype, (), 2),
        "nothing": in_form(form, dtype, (2, 0), 3),
        "odd again": tensor_of("uint8", (1,), 4),
        "last": in_form(form, dtype, (5,), 5),
    }
    for bucket_bytes in (1, 64, 4096):
        arrived, sent, received = send(tensors, bucket_bytes=bucket_bytes)
        assert sent == received
        assert [bytes_of(tensor) for _, tensor in arrived] == [bytes_of(t) for t in tensors.values()]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("form", ["transposed", "stepped", "expanded", "overlapping", "offset"])
def test_a_tensor_that_is_not_contiguous_arrives_as_its_values(form: str) -> None:
    tensor = in_form(form, "float32", (3, 4), 7)
    assert not tensor.is_contiguous()
    ((_, arrived),), _, _ = send({"w": tensor}, bucket_bytes=1024)
    assert arrived.is_contiguous()
    assert bytes_of(arrived) == bytes_of(tensor)


@pytest.mark.requirement("R60")
@pytest.mark.parametrize("nbytes", [65, 128, 1000])
def test_a_tensor_above_the_bucket_travels_alone_and_whole(nbytes: int) -> None:
    tensors = {
        "small": tensor_of("uint8", (3,), 0),
        "large": tensor_of("uint8", (nbytes,), 1),
        "after": tensor_of("float64", (2,), 2),
    }
    layouts = lay_out_buckets(wires_of(tensors), bucket_bytes=64)
    assert [[entry.tensor for entry in layout.entries] for layout in layouts] == [[0], [1], [2]]
    assert layouts[1].entries[0].nbytes == nbytes
    arrived, sent, received = send(tensors, bucket_bytes=64)
    assert sent == received
    assert [bytes_of(tensor) for _, tensor in arrived] == [bytes_of(tensor) for tensor in tensors.values()]


def test_a_view_of_a_tensor_without_bytes_keeps_no_bucket_alive() -> None:
    wires = wires_of({"none": torch.zeros(2, 0), "some": torch.zeros(3)})
    (layout,) = lay_out_buckets(wires)
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
    (_, none), (_, some) = unpack_bucket(bucket, layout, wires)
    assert some.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
    assert none.untyped_storage().data_ptr() != bucket.untyped_storage().data_ptr()
    assert dtype_name(none.dtype) == "float32"
