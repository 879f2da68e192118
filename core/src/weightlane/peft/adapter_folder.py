"""A folder that peft saved an adapter into: its configuration and its tensors' headers; no data is read.

Only `adapter_config.json` and `adapter_model.safetensors` are opened. A pickled `adapter_model.bin` is
refused: reading it runs code that the file brings.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.checkpoint_folder import stored_in_file
from weightlane.errors import UsageError
from weightlane.peft.declared import LoraDeclaration, declared_lora
from weightlane.peft.with_tensors import adapter_config_of

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.manifest import TensorSpec
    from weightlane.peft.config import AdapterConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
_MOST_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder says (`declaration`) and holds (`tensors`, under the names of peft's checkpoint file)."""

    folder: Path
    declaration: LoraDeclaration
    tensors: tuple[TensorSpec, ...]

    def adapter(self, name: str) -> AdapterConfig:
        """The adapter under a name; raises PlanError as `adapter_config_of` does."""
        return adapter_config_of(self.declaration, name=name, tensors=self.tensors)


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Reads the configuration and the safetensors header of an adapter folder.

    Raises:
        UsageError: a file is missing, damaged, no regular file or outside the folder, or weights are pickled.
        PlanError: the configuration is none of LoRA, or is wrong in itself.
    """
    config = _file(folder, CONFIG)
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        raise UsageError(
            f"{folder / PICKLED} is not read.",
            "It is pickled: reading it runs code that the file brings.",
            f"Save the adapter with safe_serialization=True, which makes {WEIGHTS}.",
        )
    weights = _file(folder, WEIGHTS)
    return AdapterFolder(folder, declared_lora(_json(config)), tuple(stored_in_file(weights)))


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    try:
        # Followed, since hubs keep files as links into a store of their own beside the folder.
        kind = path.stat()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}).",
            f"An adapter folder holds {CONFIG} and {WEIGHTS}.",
            "Give the folder that peft's save_pretrained wrote.",
        ) from error
    if not stat.S_ISREG(kind.st_mode):
        raise UsageError(
            f"{path} is no regular file.", "A pipe or a device could hold the reader for ever.", "Replace it."
        )
    return path


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise UsageError(f"{path} has more than {_MOST_CONFIG_BYTES >> 20} MiB.", "No configuration has.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be used: {error}.", "The adapter's configuration is read from it."
        ) from error
