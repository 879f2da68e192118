"""Tensors of every dtype that may travel and of every form that a trainer may hold them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from weightlane.buckets import BucketLayout, lay_out_buckets
from weightlane.manifest import DTYPE_BYTES
from weightlane.messages import WireTensor
from weightlane.packing import WireDigest, dtype_name, memory_of, pack_bucket, torch_dtype, unpack_bucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FORMS = ("plain", "transposed", "stepped", "expanded", "overlapping", "offset", "conjugated", "negated")


def known_here() -> list[str]:
    """Dtypes that may travel and that this torch has; an older one lacks the newest."""
    return [name for name in sorted(DTYPE_BYTES) if hasattr(torch, name)]


def tensor_of(dtype: str, shape: Sequence[int], seed: int) -> Tensor:
    """Any bit pattern (NaNs too), since what travels is bytes."""
    count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(torch_dtype(dtype)).reshape(shape)


def in_form(form: str, dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of that shape whose memory is not simply its elements in a row, except for `plain`."""
    kind = torch_dtype(dtype)
    if form == "conjugated" and kind.is_complex:
        return tensor_of(dtype, shape, seed).conj()
    if form == "negated" and dtype in ("float64", "float32", "float16", "bfloat16", "complex64"):
        return torch._neg_view(tensor_of(dtype, shape, seed))
    if form == "offset":
        return tensor_of(dtype, (*shape, 2), seed)[..., 1]
    if not shape or form == "plain":
        return tensor_of(dtype, shape, seed)
    if form == "transposed":
        return tensor_of(dtype, shape[::-1], seed).permute(*reversed(range(len(shape))))
    if form == "stepped":
        return tensor_of(dtype, tuple(2 * size for size in shape), seed)[
            tuple([slice(1, None, 2)] * len(shape))
        ]
    if form == "expanded":
        return tensor_of(dtype, (1, *shape[1:]), seed).expand(shape)
    if form == "overlapping":
        return tensor_of(dtype, (sum(shape) + 1,), seed).as_strided(shape, [1] * len(shape))
    return tensor_of(dtype, shape, seed)


one_tensor = st.builds(
    in_form,
    st.sampled_from(FORMS),
    st.sampled_from(known_here()),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 1000),
)
some_tensors = st.lists(one_tensor, max_size=8).map(
    lambda tensors: {f"layers.{number}": tensor for number, tensor in enumerate(tensors)}
)


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor of any form, in a row."""
    return bytes(memory_of(tensor.resolve_conj().resolve_neg().contiguous()))


def wires_of(tensors: dict[str, Tensor]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())


def numbered(layout: BucketLayout, tensors: dict[str, Tensor]) -> list[tuple[int, Tensor]]:
    values = list(tensors.values())
    return [(entry.tensor, values[entry.tensor]) for entry in layout.entries]


def send(
    tensors: dict[str, Tensor], *, bucket_bytes: int, slots: int = 2, padding: int = 0xAA
) -> tuple[list[tuple[str, Tensor]], str, str]:
    """What arrives, the sender's digest and the receiver's."""
    wires = wires_of(tensors)
    arrived: list[tuple[str, Tensor]] = []
    sent, received = WireDigest(wires), WireDigest(wires)
    for layout in lay_out_buckets(wires, bucket_bytes=bucket_bytes, slots=slots):
        bucket = torch.full((layout.nbytes,), padding, dtype=torch.uint8)
        pack_bucket(bucket, layout, wires, numbered(layout, tensors))
        sent.update(memory_of(bucket), layout)
        elsewhere = bucket.clone()
        received.update(memory_of(elsewhere), layout)
        arrived += unpack_bucket(elsewhere, layout, wires)
    return arrived, sent.hexdigest(), received.hexdigest()
