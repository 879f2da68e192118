"""The checkpoint that a server expects, read on our side: the server would not tell a wrong name or shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import EngineError, PlanError, Problem
from weightlane.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from weightlane.receiver import ExpectedTensor
    from weightlane_sglang.server_facts import ModelInfo


_QUANTIZATION_FILE = "hf_quant_config.json"  # where ModelOpt puts it instead of config.json


class _TextConfig(msgspec.Struct):
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None  # the older key of compressed-tensors


class _Config(_TextConfig):
    architectures: list[str] | None = None
    text_config: _TextConfig | None = None


def expected_tensors(named_model: str, info: ModelInfo, *, dtype: str) -> tuple[ExpectedTensor, ...]:
    """Tensors of the server's checkpoint, with the server's `dtype` where it names one ("auto" does not).

    Args:
        named_model: the folder that the user named; "" takes the server's own, where it can be read here.
        info: the server's description of its model.
        dtype: the server's `--dtype`.

    Raises:
        EngineError: neither folder can be read here, or it holds another architecture than the server's.
        PlanError: the checkpoint is quantised already, which the server finds out by itself and reports
            as no quantization at all.
    """
    from weightlane.checkpoint import expected_tensors_of_config

    folder = model_folder(named_model, info)
    _refuse_quantized(folder)
    served = Path(info.model_path)
    if served != folder and served.is_absolute() and (served / "config.json").is_file():
        _refuse_quantized(served)  # the user may have named the plain twin of a quantised checkpoint
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
    config = _read_config(folder)
    if config.architectures and info.architectures and config.architectures != info.architectures:
        raise EngineError(
            f"{folder} holds {', '.join(config.architectures)}, but the server runs "
            f"{', '.join(info.architectures)}.",
            "It is not the checkpoint that the server was started from.",
            "Pass model=DIR, the right one.",
        )
    return folder


def _read_config(folder: Path) -> _Config:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"{folder / 'config.json'} is not a model configuration: {error}.") from error


def _refuse_quantized(folder: Path) -> None:
    config = _read_config(folder)
    found: list[tuple[str, str]] = []
    for where, part in (("", config), ("text_config.", config.text_config)):
        if part is None:
            continue
        for key in ("quantization_config", "compression_config"):
            settings: dict[str, Any] | None = getattr(part, key)
            if settings is not None:
                method = settings.get("quant_method") or settings.get("quant_algo") or "an unnamed method"
                found.append((f"{where}{key}", str(method)))
    if (folder / _QUANTIZATION_FILE).is_file():
        found.append((_QUANTIZATION_FILE, "modelopt"))
    if found:
        raise PlanError(
            [
                Problem(
                    "capability",
                    subject,
                    f"the checkpoint in {folder} is quantised ({method}), so that the server holds packed "
                    "weights and scales, and a plain tensor written over them by name would not be one",
                    "Start the server from the checkpoint before it was quantised.",
                )
                for subject, method in found
            ]
        )
