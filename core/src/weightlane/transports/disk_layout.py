"""How one bucket lies in its safetensors file: the file's name, its header and each tensor's place.

Writer and reader both make this from the plan, so a file's header is known byte for byte before it is read.
The format is that of https://github.com/huggingface/safetensors: eight bytes of header length, a JSON header,
then the tensors without a gap. Files are named, and listed in an index, as Hugging Face's loaders expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weightlane.buckets import ALIGNMENT, aligned, wire_nbytes
from weightlane.errors import Problem
from weightlane.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.messages import WireTensor

MANIFEST_NAME = "weightlane.json"
INDEX_NAME = "model.safetensors.index.json"
METADATA_NAME = "__metadata__"

STORED_DTYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The format's own names of the dtypes that may travel."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """One bucket's file.

    `header` is all that comes before the first tensor. `starts[i]` is the byte of the file at which the
    bucket's tensor i begins; `order` lists the tensors as they follow one another in the file.
    """

    name: str
    header: bytes
    starts: tuple[int, ...]
    order: tuple[int, ...]
    nbytes: int


def stored_problems(tensors: Sequence[WireTensor], names: Sequence[str]) -> list[Problem]:
    """What a safetensors file cannot hold, by canonical name."""
    problems = [
        Problem(
            "dtype",
            name,
            f"{tensor.dtype} cannot be written to a safetensors file",
            "Choose another transport.",
        )
        for tensor, name in zip(tensors, names, strict=True)
        if tensor.dtype not in STORED_DTYPES
    ]
    problems += [
        Problem("extra-name", name, "a safetensors file keeps this name for itself", "Rename the tensor.")
        for name in names
        if name == METADATA_NAME
    ]
    return problems


def store_bucket(
    number: int, buckets: int, tensors: Sequence[WireTensor], names: Sequence[str]
) -> StoredBucket:
    """The file of bucket `number` (from 0) of `buckets`, holding `tensors` under their canonical `names`.

    Wide dtypes come first, so that each tensor starts at a multiple of its own element size.
    """
    order = sorted(range(len(tensors)), key=lambda item: -DTYPE_BYTES[tensors[item].dtype])
    header: dict[str, object] = {METADATA_NAME: {"format": "pt"}}
    begin = 0
    begins = [0] * len(tensors)
    for item in order:
        tensor = tensors[item]
        end = begin + wire_nbytes(tensor)
        header[names[item]] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begins[item] = begin
        begin = end
    text = msgspec.json.encode(header)
    # The format allows blanks after the JSON text; with them the first tensor is aligned for every dtype.
    text = text.ljust(aligned(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES)
    before = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    if len(before) % ALIGNMENT:
        raise AssertionError("the header was padded to the alignment")
    return StoredBucket(
        name=f"model-{number + 1:05d}-of-{buckets:05d}.safetensors",
        header=before,
        starts=tuple(len(before) + start for start in begins),
        order=tuple(order),
        nbytes=len(before) + begin,
    )


def index_of(files: Sequence[tuple[str, Sequence[str]]], nbytes: int) -> bytes:
    """Hugging Face's index of (file, its tensors' names), as JSON; `nbytes` is the size of all tensors."""
    return msgspec.json.encode(
        {
            "metadata": {"total_size": nbytes},
            "weight_map": {name: file for file, names in files for name in names},
        }
    )
