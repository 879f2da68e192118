"""What is packed is what is unpacked, for every dtype, stride and size that may travel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightlane.buckets import BucketLayout, lay_out_buckets
from weightlane.errors import ExportError
from weightlane.manifest import DTYPE_BYTES
from weightlane.messages import WireTensor
from weightlane.packing import (
    WireDigest,
    dtype_name,
    memory_of,
    pack_bucket,
    torch_dtype,
    unpack_bucket,
)

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "transport_cases.json").read_text())
}


def random_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Any bit pattern (NaNs too), since what travels is bytes."""
    count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
    data = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return data.view(torch_dtype(dtype)).reshape(shape)


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(memory_of(tensor.contiguous()))


def wires_of(tensors: dict[str, Tensor]) -> list[WireTensor]:
    return [WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()]


def send(tensors: dict[str, Tensor], **bucket_options: int) -> list[tuple[str, Tensor]]:
    wires = wires_of(tensors)
    arrived: list[tuple[str, Tensor]] = []
    for layout in lay_out_buckets(wires, **bucket_options):
        bucket = torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8)
        pack_bucket(bucket, layout, wires, numbered(layout, tensors))
        arrived += unpack_bucket(bucket, layout, wires)
    return arrived


def numbered(layout: BucketLayout, tensors: dict[str, Tensor]) -> list[tuple[int, Tensor]]:
    values = list(tensors.values())
    return [(entry.tensor, values[entry.tensor]) for entry in layout.entries]


def assert_same(arrived: list[tuple[str, Tensor]], sent: dict[str, Tensor]) -> None:
    assert [name for name, _ in arrived] == list(sent)
    for name, tensor in arrived:
        assert (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape), name
        assert bytes_of(tensor) == bytes_of(sent[name]), name


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's word on making such a tensor at all
@pytest.mark.requirement("R62")
@pytest.mark.requirement("R63")
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_after_an_odd_length_in_every_form(dtype: str) -> None:
    base = random_tensor(dtype, (6, 4))
    sent = {
        "odd": random_tensor("uint8", (3,)),
        "plain": random_tensor(dtype, (5,)),
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "expanded": random_tensor(dtype, (1, 3)).expand(4, 3),
        "scalar": random_tensor(dtype, ()),
        "nothing": random_tensor(dtype, (0, 3)),
        "odd too": random_tensor("uint8", (1,)),
        "after nothing": random_tensor(dtype, (2, 1, 2)),
    }
    assert_same(send(sent), sent)
    assert_same(send(sent, bucket_bytes=64), sent)


@pytest.mark.requirement("R62")
def test_three_halves_and_a_float() -> None:
    sent = {f"h{i}": random_tensor("float16", (1,)) for i in range(3)} | {"f": random_tensor("float32", (2,))}
    assert_same(send(sent), sent)


def test_three_halves_and_a_float_back_to_back_cannot_be_viewed() -> None:
    # The symptom that aligned offsets prevent.
    with pytest.raises(RuntimeError, match="divisible by 4"):
        torch.zeros(14, dtype=torch.uint8)[6:14].view(torch.float32)


@pytest.mark.requirement("R62")
def test_case_tr_03_an_odd_length_before_a_wider_dtype() -> None:
    case = CASES["tr-03"]["input"]
    sent = {name: random_tensor(dtype, tuple(shape)) for name, dtype, shape in case["tensors"]}
    assert_same(send(sent, bucket_bytes=case["bucket_bytes"]), sent)
    # In one bucket as well: the case's own offset, 4, is the least that is right; ours is the next line.
    (layout,) = lay_out_buckets(wires_of(sent), bucket_bytes=1024)
    least = CASES["tr-03"]["expected"]["offsets"]
    assert all(entry.offset % least["w"] == 0 for entry in layout.entries)
    assert_same(send(sent, bucket_bytes=1024), sent)


def test_case_tr_13_what_was_copied_survives_the_next_use_of_the_buffer() -> None:
    updates = CASES["tr-13"]["input"]["updates"]
    wires = [WireTensor("w", (1,), "float32")]
    (layout,) = lay_out_buckets(wires)
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
    copies, views = [], []
    for _, value in updates:
        pack_bucket(bucket, layout, wires, [(0, torch.tensor(value, dtype=torch.float32))])
        ((_, view),) = unpack_bucket(bucket, layout, wires)
        copies.append(view.clone())
        views.append(view)
    assert copies[0].tolist() == CASES["tr-13"]["expected"]["first_copy_after_second_update"]
    # The symptom: whoever keeps the view, or "moves" it to the device where it is, sees the second update.
    assert views[0].tolist() == views[0].to("cpu").tolist() == updates[1][1]


def test_case_tr_20_names_stay_with_their_bytes_across_dtype_switches() -> None:
    order = CASES["tr-20"]["input"]["raw_order"]
    sent = {
        name: torch.full(tuple(shape), value, dtype=torch_dtype(dtype))
        for value, (name, dtype, shape) in enumerate(order, 1)
    }
    arrived = send(sent)
    assert_same(arrived, sent)
    assert [tensor.float().tolist() for _, tensor in arrived] == [[1, 1], [2, 2], [3, 3]]
    # A sender that regroups by dtype is refused, though the total of bytes agrees.
    wires = wires_of(sent)
    (layout,) = lay_out_buckets(wires)
    regrouped = sorted(numbered(layout, sent), key=lambda item: str(item[1].dtype))
    with pytest.raises(ExportError, match="its order"):
        pack_bucket(torch.zeros(layout.nbytes, dtype=torch.uint8), layout, wires, regrouped)


def test_a_cast_is_made_on_the_way() -> None:
    wires = [WireTensor("w", (3,), "bfloat16")]
    (layout,) = lay_out_buckets(wires)
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
    value = torch.tensor([1.0, 1.00390625, -3.5], requires_grad=True)
    pack_bucket(bucket, layout, wires, [(0, value)])
    ((_, arrived),) = unpack_bucket(bucket, layout, wires)
    assert torch.equal(arrived, value.detach().bfloat16())


def wrong_exports() -> dict[str, tuple[list[tuple[int, Tensor]], str]]:
    a, b = torch.zeros(2), torch.zeros(3)
    return {
        "one too few": ([(0, a)], "first|second"),
        "a stranger": ([(0, a), (1, b), (7, b)], "number 7"),
        "twice": ([(0, a), (0, a)], "second"),
        "other order": ([(1, b), (0, a)], "its order"),
        "other shape": ([(0, a), (1, torch.zeros(1, 3))], r"second has shape \[1, 3\] now, but \[3\]"),
        # copy_ alone would broadcast it
        "broadcastable": ([(0, a), (1, torch.zeros(()))], r"second has shape \[\] now"),
    }


@pytest.mark.parametrize("kind", sorted(wrong_exports()))
def test_an_export_that_is_not_the_plans_is_refused_before_anything_is_written(kind: str) -> None:
    export, told = wrong_exports()[kind]
    wires = [WireTensor("first", (2,), "float32"), WireTensor("second", (3,), "float32")]
    (layout,) = lay_out_buckets(wires)
    bucket = torch.full((layout.nbytes,), 7, dtype=torch.uint8)
    with pytest.raises(ExportError, match=told):
        pack_bucket(bucket, layout, wires, export)
    assert bool((bucket == 7).all())


def test_memory_of_shares_and_refuses_what_it_cannot_share() -> None:
    tensor = torch.zeros(4, dtype=torch.int16)
    memory_of(tensor)[2] = 5
    assert tensor.tolist() == [0, 5, 0, 0]
    assert bytes(memory_of(torch.zeros(0, 3))) == b""
    with pytest.raises(ValueError, match="contiguous CPU"):
        memory_of(torch.zeros(3, 3).t()[1:])
    with pytest.raises(ValueError, match="contiguous CPU"):
        memory_of(torch.zeros(3, device="meta"))


def digest_of(tensors: dict[str, Tensor], padding: int, **options: int) -> str:
    wires = wires_of(tensors)
    digest = WireDigest(wires)
    for layout in lay_out_buckets(wires, **options):
        bucket = torch.full((layout.nbytes,), padding, dtype=torch.uint8)
        pack_bucket(bucket, layout, wires, numbered(layout, tensors))
        digest.update(memory_of(bucket), layout)
    return digest.hexdigest()


def test_the_digest_is_of_the_tensors_not_of_padding_or_buckets() -> None:
    sent: dict[str, Any] = {"a": random_tensor("uint8", (3,)), "b": random_tensor("float32", (70,))}
    known = digest_of(sent, 0)
    assert digest_of(sent, 255) == known
    assert digest_of(sent, 0, bucket_bytes=64) == known
    whole = WireDigest(wires_of(sent))
    for tensor in sent.values():
        whole.update_whole(memory_of(tensor))
    assert whole.hexdigest() == known
    sent["b"].view(torch.uint8)[279] ^= 1
    assert digest_of(sent, 0) != known
