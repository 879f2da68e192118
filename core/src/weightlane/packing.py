"""Packing tensors into bucket memory and viewing them there again, and the digest of what travels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import xxhash

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketEntry, BucketLayout
    from weightlane.messages import WireTensor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire dtype name such as `bfloat16`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def view_in_bucket(bucket: Tensor, entry: BucketEntry, wire: WireTensor) -> Tensor:
    """A tensor of the wire's shape and dtype on the bucket's own memory (uint8, shape (nbytes,))."""
    if entry.nbytes == 0:
        return torch.empty(wire.shape, dtype=torch_dtype(wire.dtype))
    flat = bucket[entry.offset : entry.offset + entry.nbytes]
    return flat.view(torch_dtype(wire.dtype)).view(wire.shape)


def check_bucket(
    layout: BucketLayout, wires: Sequence[WireTensor], tensors: Sequence[tuple[int, Tensor]]
) -> None:
    """Raises ExportError when the tensors are not those of the layout, in its order and in their shapes."""
    given = [number for number, _ in tensors]
    planned = [entry.tensor for entry in layout.entries]
    if given != planned:
        differing = sorted(set(planned) ^ set(given))
        names = [
            wires[number].name if 0 <= number < len(wires) else f"number {number}" for number in differing
        ]
        raise ExportError(
            f"Bucket {layout.index} of the export differs from the plan in "
            f"{', '.join(names) or 'its order'}.",
            "The trainer yielded other tensors than its manifest announced.",
            "Connect again after changing the model.",
        )
    for number, tensor in tensors:
        wire = wires[number]
        if tuple(tensor.shape) != wire.shape:
            raise ExportError(
                f"{wire.name} has shape {list(tensor.shape)} now, but {list(wire.shape)} in the plan.",
                "The model was changed after connect.",
                "Connect again.",
            )


def pack_bucket(
    bucket: Tensor, layout: BucketLayout, wires: Sequence[WireTensor], tensors: Sequence[tuple[int, Tensor]]
) -> None:
    """Copies tensors into the bucket at the layout's offsets, casting to the travelling dtype.

    Takes any strides and any device. Raises ExportError, before writing anything, when the tensors are not
    the layout's.
    """
    check_bucket(layout, wires, tensors)
    with torch.no_grad():
        for entry, (_, tensor) in zip(layout.entries, tensors, strict=True):
            view_in_bucket(bucket, entry, wires[entry.tensor]).copy_(tensor)


def unpack_bucket(
    bucket: Tensor, layout: BucketLayout, wires: Sequence[WireTensor]
) -> list[tuple[str, Tensor]]:
    """(name, view) for every tensor of the bucket; views live as long as the bucket's memory is theirs."""
    return [
        (wires[entry.tensor].name, view_in_bucket(bucket, entry, wires[entry.tensor]))
        for entry in layout.entries
    ]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("memory_of takes a contiguous CPU tensor")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # keeps the memory for as long as a view of it lives
    return memoryview(array).cast("B")


class WireDigest:
    """xxh3 over every travelling tensor's bytes, in plan order; padding between tensors does not count."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, memory: memoryview, layout: BucketLayout) -> None:
        """Adds one bucket."""
        for entry in layout.entries:
            self._hash.update(memory[entry.offset : entry.offset + entry.nbytes])

    def update_whole(self, memory: memoryview) -> None:
        """Adds one tensor's bytes."""
        self._hash.update(memory)

    def hexdigest(self) -> str:
        """Sixteen hex digits."""
        return self._hash.hexdigest()
