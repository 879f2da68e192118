"""The checkpoint that a server expects, read on our side: the server would not tell a wrong name or shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError
from weightlane.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from weightlane.receiver import ExpectedTensor
    from weightlane_sglang.server_facts import ModelInfo


class _Config(msgspec.Struct):
    architectures: list[str] | None = None


def expected_tensors(named_model: str, info: ModelInfo, *, dtype: str) -> tuple[ExpectedTensor, ...]:
    """Tensors of the server's checkpoint, with the server's `dtype` where it names one ("auto" does not).

    Args:
        named_model: the folder that the user named; "" takes the server's own, where it can be read here.
        info: the server's description of its model.
        dtype: the server's `--dtype`.

    Raises:
        EngineError: neither folder can be read here, or it holds another architecture than the server's.
    """
    from weightlane.checkpoint import expected_tensors_of_config

    folder = model_folder(named_model, info)
    if dtype not in DTYPE_BYTES:
        return tuple(expected_tensors_of_config(folder))
    return tuple(
        msgspec.structs.replace(tensor, dtype=dtype) for tensor in expected_tensors_of_config(folder)
    )


def model_folder(named_model: str, info: ModelInfo) -> Path:
    """The folder with the server's `config.json` as seen from here; see `expected_tensors`."""
    served = Path(info.model_path)
    # a relative path means something in the server's working directory, not in ours
    folder = Path(named_model) if named_model else served
    if not (folder / "config.json").is_file() or not (named_model or served.is_absolute()):
        raise EngineError(
            f"The checkpoint of the server cannot be read here: {str(folder)!r} has no config.json that this "
            "process can open.",
            "Names and shapes must be checked on this side, since SGLang ignores an unknown name silently "
            "and dies of a wrong shape.",
            "Pass model=DIR, a folder with the config.json that the server was started from.",
        )
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"{folder / 'config.json'} is not a model configuration: {error}.") from error
    if config.architectures and info.architectures and config.architectures != info.architectures:
        raise EngineError(
            f"{folder} holds {', '.join(config.architectures)}, but the server runs "
            f"{', '.join(info.architectures)}.",
            "It is not the checkpoint that the server was started from.",
            "Pass model=DIR, the right one.",
        )
    return folder
