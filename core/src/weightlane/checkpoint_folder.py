"""What a checkpoint folder holds, without reading its data: safetensors headers and `config.json`.

The format is that of https://github.com/huggingface/safetensors: eight bytes of header length, a JSON header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weightlane.errors import UsageError
from weightlane.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightlane.transports.disk_layout import INDEX_NAME, METADATA_NAME, STORED_DTYPES
from weightlane.types import Phase

_ONE_FILE = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000  # as the format's own reader
_LENGTH_BYTES = 8
_DTYPES = {stored: name for name, stored in STORED_DTYPES.items()}


class _Stored(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder's architecture and the manifest of a sync of all that it holds.

    `stored` is False where it has a configuration alone: the manifest is then what that asks for.
    """

    folder: Path
    architecture: str
    manifest: Manifest
    stored: bool


def read_checkpoint_folder(folder: Path) -> CheckpointFolder:
    """Reads headers and configuration; no weight is read, nothing downloaded, no code of the folder run.

    Without a weight file, names and shapes are those that transformers' model class asks for, in the dtype
    that the configuration tells, else float32.

    Raises:
        UsageError: there is no configuration, or a file is damaged or names a dtype that cannot travel.
        EngineError: there are no weights, and transformers cannot build the configuration.
    """
    config = read_config(folder)
    architectures = config.get("architectures") or []
    architecture = str(architectures[0]) if architectures else ""
    specs = stored_tensors(folder)
    if specs is not None:
        return CheckpointFolder(folder, architecture, Manifest(Phase.FULL, 1, specs), stored=True)
    from weightlane.checkpoint import expected_tensors_of_config

    told = config.get("dtype") or config.get("torch_dtype")
    dtype = told if told in DTYPE_BYTES else "float32"
    asked = tuple(
        TensorSpec(item.name, item.shape, dtype, (0,))
        for item in expected_tensors_of_config(folder)
        if not item.tied_to
    )
    return CheckpointFolder(folder, architecture, Manifest(Phase.FULL, 1, asked), stored=False)


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder.

    Raises:
        UsageError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UsageError(
            f"{folder} has no config.json that can be read ({error.strerror}).",
            "The architecture is read from it.",
            "Give the folder of a Hugging Face checkpoint.",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error


def stored_tensors(folder: Path) -> tuple[TensorSpec, ...] | None:
    """Every tensor of the folder's safetensors files, in file order; None where it has none.

    Raises:
        UsageError: a file is missing, damaged, or holds a dtype that cannot travel.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            held = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(index, str(error)) from error
        files = sorted(set(held.values()))
        strange = [name for name in files if Path(name).name != name]
        if strange:
            raise _damaged(index, f"it names {strange[0]!r}, which is no file beside it")
        specs = [
            spec for name in files for spec in stored_in_file(folder / name) if held.get(spec.name) == name
        ]
        lost = sorted(set(held) - {spec.name for spec in specs})
        if lost:
            raise _damaged(index, f"{lost[0]} is not in the file that it names")
        return tuple(specs)
    one = folder / _ONE_FILE
    return tuple(stored_in_file(one)) if one.is_file() else None


def stored_in_file(path: Path) -> list[TensorSpec]:
    """Every tensor of one safetensors file, by its header alone, held by rank 0.

    Raises:
        UsageError: it cannot be read, is damaged, or holds a dtype that cannot travel.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(_MOST_HEADER_BYTES, path.stat().st_size):
                raise _damaged(path, f"its header would be {length} bytes long")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        stored = {
            name: msgspec.json.decode(value, type=_Stored)
            for name, value in raw.items()
            if name != METADATA_NAME
        }
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    for name, item in stored.items():
        if item.dtype not in _DTYPES:
            raise _damaged(path, f"{name} has dtype {item.dtype}, which cannot travel")
        if any(size < 0 for size in item.shape) or math.prod(item.shape) >= 1 << 63:
            raise _damaged(path, f"{name} cannot have shape {list(item.shape)}")
    return [TensorSpec(name, item.shape, _DTYPES[item.dtype], (0,)) for name, item in stored.items()]


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} cannot be used: {why}.",
        "Names, shapes and dtypes of the checkpoint are read from it.",
        "Check the folder, or download it again.",
    )
