"""The checkpoint that a Hugging Face model class asks for: canonical names, full shapes, ties.

Read from the class itself, built on the meta device, so that nothing is guessed from name tables and no
memory is taken. transformers is imported inside the functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlane.checkpoint_renames import renamed_once, reversed_renames
from weightlane.errors import EngineError
from weightlane.receiver import ExpectedTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One checkpoint tensor of a model in memory.

    `live_name` is the model's own name for it, or "" where the model holds it inside another tensor
    (transformers 5 fuses experts). `tied_to` is the canonical name of the tensor whose storage it shares.
    """

    canonical: str
    live_name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str = ""


def expected_tensors_of_config(config_or_dir: object) -> tuple[ExpectedTensor, ...]:
    """The tensors a causal language model of this configuration is loaded from.

    Args:
        config_or_dir: a transformers configuration object, or a folder with a `config.json`. Nothing is
            downloaded and no code from the folder is run.

    Returns:
        Parameters and persistent buffers in the model's order, full shapes, dtype "" (a configuration does
        not tell what an engine keeps in memory).

    Raises:
        EngineError: transformers is missing, or it cannot build this configuration.
    """
    model = build_on_meta(config_or_dir)
    return tuple(
        ExpectedTensor(name=item.canonical, shape=item.shape, tied_to=item.tied_to)
        for item in checkpoint_tensors_of_model(model)
    )


def build_on_meta(config_or_dir: object) -> Any:
    """The model of a configuration on the meta device; default dtype, device and random state stay."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    except ImportError as error:
        raise EngineError(
            f"The checkpoint of {config_or_dir!r} cannot be worked out: {error}.",
            "Names and shapes are read from transformers' own model class.",
            'Install it: pip install "weightlane[reference]"',
        ) from error
    if isinstance(config_or_dir, PretrainedConfig):
        config, source = config_or_dir, type(config_or_dir).__name__
    else:
        folder = Path(str(config_or_dir))
        source = str(folder)
        if not (folder / "config.json").is_file():
            raise EngineError(
                f"{folder} has no config.json.",
                "The expected checkpoint is read from the configuration in a local folder.",
                "Give the folder of a Hugging Face checkpoint.",
            )
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise _unbuildable(source, error) from error
    auto_model: Any = AutoModelForCausalLM  # transformers does not annotate from_config
    try:
        with torch.device("meta"):
            model = auto_model.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise _unbuildable(source, error) from error
    model.tie_weights()
    return model


def checkpoint_tensors_of_model(model: Any) -> tuple[CheckpointTensor, ...]:
    """The checkpoint tensors of a transformers model, on any device, without reading their data.

    transformers 5 keeps some models under other names than their checkpoints; its own conversion table,
    reversed, gives the checkpoint's. Ties are found by object identity, after `tie_weights`.

    Raises:
        EngineError: the model's state holds something other than tensors, or the reversed conversion fails.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)  # keep_vars: the objects themselves
    for name, value in state.items():
        if not hasattr(value, "dtype"):
            raise EngineError(
                f"{name} of {type(model).__name__} is {type(value).__name__}, not a tensor.",
                "Extra state of modules cannot travel.",
            )
    checkpoint = _checkpoint_names(model, state)
    live_names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        live_names.setdefault(id(tensor), []).append(name)
    found: list[CheckpointTensor] = []
    owners: dict[int, str] = {}
    for canonical, tensor in checkpoint.items():
        names = live_names.get(id(tensor), [])
        live = canonical if canonical in names else (names[0] if names else "")
        found.append(
            CheckpointTensor(
                canonical=canonical,
                live_name=live,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                tied_to=owners.get(id(tensor), ""),
            )
        )
        owners.setdefault(id(tensor), canonical)
    return tuple(found)


def _checkpoint_names(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state under its checkpoint names, in the model's order; the same objects where nothing is split."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # transformers 4: the checkpoint's, save for the prefixes that some classes declare.
        prefixes = reversed_renames(getattr(model, "_checkpoint_conversion_mapping", None) or {})
        return {renamed_once(name, prefixes): tensor for name, tensor in state.items()}
    import torch

    # Meta stand-ins: shapes are wanted, not copies of a live model's experts. One per name, ties included.
    stand_ins = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    position = {id(stand_in): number for number, stand_in in enumerate(stand_ins.values())}
    originals = {id(stand_in): state[name] for name, stand_in in stand_ins.items()}
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(stand_ins))
    except Exception as error:
        raise EngineError(
            f"The checkpoint names of {type(model).__name__} cannot be worked out: {error}.",
            "transformers could not reverse its own conversion of this model (fused experts, for one).",
            "Use a model whose checkpoint holds the tensors as the model does, or another transformers "
            "version.",
        ) from error
    # Reversing sorts by name; a tie's owner is the first in the model's own order, so that is restored.
    ordered = sorted(reverted.items(), key=lambda item: position.get(id(item[1]), len(position)))
    return {name: originals.get(id(tensor), tensor) for name, tensor in ordered}


def _unbuildable(source: str, error: BaseException) -> EngineError:
    return EngineError(
        f"transformers cannot build a causal language model from {source}: {error}.",
        "The expected checkpoint is read from the model class of the configuration.",
        "Check the folder's config.json and that this transformers version knows its model_type.",
    )
