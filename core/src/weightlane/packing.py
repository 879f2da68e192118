"""Packing tensors into bucket memory and viewing them there again, and the digest of what travels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from weightlane.errors import ExportError, Problem, ProtocolError
from weightlane.manifest import DTYPE_BYTES, FLOATING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketEntry, BucketLayout
    from weightlane.messages import WireTensor

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire dtype name such as `bfloat16`.

    Raises:
        ProtocolError: no such dtype may travel, or this process's torch does not know it.
    """
    dtype = getattr(torch, name, None) if name in DTYPE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(
            f"Tensors of dtype {name!r} cannot be read here.",
            f"torch {torch.__version__} of this process does not know it, or it is none that may travel.",
            "Install a torch that knows it on both sides, or send another dtype.",
        )
    return dtype


def unreadable_dtypes(wires: Sequence[WireTensor]) -> list[Problem]:
    """One problem per dtype that may travel and that this process's torch does not know."""
    first = {wire.dtype: wire.name for wire in reversed(wires)}
    return [
        Problem("dtype", name, f"dtype {dtype} is not known to torch {torch.__version__} of the receiver")
        for dtype, name in first.items()
        if not isinstance(getattr(torch, dtype, None), torch.dtype)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def view_in_bucket(bucket: Tensor, entry: BucketEntry, wire: WireTensor) -> Tensor:
    """A tensor of the wire's shape and dtype on the bucket's own memory (uint8, shape (nbytes,))."""
    # A tensor without bytes shares none: a kept view of it must not keep the bucket's memory.
    flat = bucket[entry.offset : entry.offset + entry.nbytes] if entry.nbytes else _NO_BYTES
    return flat.view(torch_dtype(wire.dtype)).view(wire.shape)


def is_plain(tensor: object) -> bool:
    """Whether it is a whole dense tensor with data, whose bytes alone are its value."""
    return (
        isinstance(tensor, torch.Tensor)
        and not hasattr(tensor, "full_tensor")
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_freed(tensor)
    )


def is_freed(tensor: Tensor) -> bool:
    """Whether its owner let go of its memory, as trainers do to offload it: reading it ends the process."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def kind_of(tensor: object) -> str:
    """What a thing that is not plain is, for messages."""
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return "a tensor on the meta device"
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and is_freed(tensor):
        return "a tensor whose memory was freed"
    if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}"
    return f"a {type(tensor).__name__}"


def check_bucket(
    layout: BucketLayout, wires: Sequence[WireTensor], tensors: Sequence[tuple[int, Tensor]]
) -> None:
    """Raises ExportError when the tensors are not those of the layout.

    They must come in its order, be plain, have the planned shape, and the planned dtype or one that may be
    cast to it (`FLOATING`).
    """
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
        _check_tensor(wires[number], tensor)


def _check_tensor(wire: WireTensor, tensor: Tensor) -> None:
    if not is_plain(tensor):
        raise ExportError(
            f"{wire.name} is {kind_of(tensor)}, not a plain tensor with data.",
            "A stream yields whole dense tensors, whose bytes alone are their value.",
            "Report this to the trainer's plugin, or exclude the tensor.",
        )
    if tuple(tensor.shape) != wire.shape:
        raise ExportError(
            f"{wire.name} has shape {list(tensor.shape)} now, but {list(wire.shape)} in the plan.",
            "The model was changed after connect.",
            "Connect again.",
        )
    dtype = dtype_name(tensor.dtype)
    if dtype != wire.dtype and not {dtype, wire.dtype} <= FLOATING:
        # copy_ would cast it, and a cast between kinds changes the values.
        raise ExportError(
            f"{wire.name} has dtype {dtype} now, but travels as {wire.dtype} in the plan.",
            f"Only {', '.join(sorted(FLOATING))} are cast into one another.",
            "Connect again after changing the model, or export it as planned.",
        )


def pack_bucket(
    bucket: Tensor, layout: BucketLayout, wires: Sequence[WireTensor], tensors: Sequence[tuple[int, Tensor]]
) -> None:
    """Copies tensors into the bucket at the layout's offsets, casting to the travelling dtype.

    Takes any strides and any device, and conjugated or negated views. Raises ExportError, before writing
    anything, when the tensors are not the layout's.
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
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        # Of a lazily conjugated or negated view, memory holds the values before that.
        raise ValueError("memory_of takes a contiguous CPU tensor that is no conjugated or negated view")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # keeps the memory for as long as a view of it lives
    return memoryview(array).cast("B")


class WireDigest:
    """xxh3 over names, shapes and dtypes as this side knows them, then every tensor's bytes, in plan order.

    Two sides that cut the same bytes into other tensors do not agree. Padding between tensors does not count.
    """

    def __init__(self, wires: Sequence[WireTensor]) -> None:
        self._hash = xxhash.xxh3_64(msgspec.msgpack.encode(wires))

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
