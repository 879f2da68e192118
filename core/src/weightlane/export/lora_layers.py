"""What a layer of peft's adds to a tensor of the layer that it is around; other kinds are refused by name."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.errors import ExportError, PlanError
from weightlane.export.deltas import BiasStep, ExpertLowRank, LowRank, TokenRows
from weightlane.export.paths import own_class
from weightlane.peft.expert_axes import axis_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.export.places import PeftLayer
    from weightlane.export.recipe import Source
    from weightlane.peft.expert_axes import Storage

_LORA = "peft.tuners.lora.layer"
_KINDS = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper")
_TOKENS = "TrainableTokensLayer"
_VARIANTS = (
    "DoraLinearVariant",
    "DoraEmbeddingVariant",
    # These differ in how they train; what they add to a weight is plain LoRA's.
    "VeloraLinearVariant",
    "MiCALinearVariant",
    "MiCAEmbeddingVariant",
)
_FULL = "Train it with plain LoRA, or merge it in the trainer and use mode full."
_QAT = re.compile(r"(^|\.)qat(\.|$)|\bQAT[A-Z]|[Ff]ake_?[Qq]uant")


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a merge and the keys of the tensors that it takes."""

    step: LowRank | ExpertLowRank | BiasStep | TokenRows
    keys: tuple[str, ...]


def changes_of(
    layer: PeftLayer, leaf: str, adapters: Sequence[str], base: Source, sources: Mapping[str, Source]
) -> list[Change]:
    """What the adapters of a layer add to the tensor `leaf` of what it is around, in order.

    Args:
        layer: the layer; its matrices are read from `sources` alone.
        leaf: the tensor's name below the layer, `weight` or a parameter of experts.
        adapters: which to merge; those that this layer has not are passed over.
        base: the tensor itself.
        sources: every tensor of the trainer by cleaned key.

    Raises:
        ExportError: the layer is of a kind whose merge is not known, or a matrix is not among the sources.
    """
    kind = _kind(layer)
    module = layer.module
    changes: list[Change] = []
    for adapter in _of_layer(layer, kind, adapters):
        if kind == _TOKENS:
            if leaf == "weight":
                rows = tuple(int(row) for row in module.token_indices[adapter])
                changes.append(Change(TokenRows(rows), (f"{layer.path}.trainable_tokens_delta.{adapter}",)))
            continue
        scaling = float(module.scaling[adapter])
        if kind == "ParamWrapper":
            if leaf == module.parameter_name:
                changes.append(_of_parameter(layer, adapter, scaling, base, sources))
        elif leaf == "weight":
            changes.append(_of_weight(layer, kind, adapter, scaling))
        if leaf == "bias" and _trains_bias(module, adapter):
            changes.append(Change(BiasStep(scaling), (f"{layer.path}.lora_B.{adapter}.bias",)))
    absent = [key for change in changes for key in change.keys if key not in sources]
    if absent:
        raise ExportError(
            f"{absent[0]} is not among the trainer's tensors, and {len(absent) - 1} more.",
            f"{layer.path} needs it to merge its adapter.",
            "Report this to the trainer's plugin.",
        )
    for change in changes:
        _require_fitting(layer, change, base, sources)
    return changes


def require_mergeable(layer: PeftLayer, adapters: Sequence[str]) -> None:
    """Raises ExportError where a layer computes now with something else than base and adapters.

    Its adapters are merged into the live base already, or are switched off, or its base is quantised.
    """
    module = layer.module
    require_unmerged(layer)
    require_plain_base(layer)  # before the kind: peft has kinds of its own for bases of each quantiser
    mine = _of_layer(layer, _kind(layer), adapters)
    if mine and getattr(module, "disable_adapters", False):
        raise ExportError(
            f"The adapters of {layer.path} are switched off now.",
            "The trainer computes with the base alone, and what the engine is to serve cannot be told.",
            "Sync outside disable_adapter(), or name the phase you want: mode merged needs them on.",
        )
    for adapter in mine:
        variant = getattr(module, "lora_variant", {}).get(adapter)
        if variant is not None and type(variant).__name__ not in _VARIANTS:
            raise ExportError(
                f"{layer.path} has adapter {adapter} of the kind {type(variant).__name__}.",
                "How it changes the weight is not known here.",
                _FULL,
            )
        if _trains_bias(module, adapter) and getattr(_innermost(module), "bias", None) is None:
            raise ExportError(
                f"{layer.path} trains a bias in adapter {adapter}, and its base has none.",
                "A merged weight has no place for it.",
                "Leave lora_bias out, or target layers that have a bias.",
            )


def require_unmerged(layer: PeftLayer) -> None:
    """Raises ExportError where an adapter is merged into the live base."""
    merged = list(getattr(layer.module, "merged_adapters", ()))
    if merged:
        raise ExportError(
            f"{layer.path} has adapter {merged[0]} merged into its base weight now.",
            "The adapter would be added a second time.",
            "Call unmerge_adapter() before a sync; weightlane merges copies and never the live weights.",
        )


def require_plain_base(layer: PeftLayer) -> None:
    """Raises ExportError where the layer's base is quantised: its bytes are no weight, and get none added."""
    base = _innermost(layer.module)
    weight = base._parameters.get("weight")
    package = own_class(base).__module__.partition(".")[0]
    tensor_package = type(weight).__module__.partition(".")[0]
    names = [name for name in ("quant_state", "SCB", "CB") if getattr(weight, name, None) is not None]
    # A sharded weight has lost what it knew of itself, and may pose as floating; the module has not.
    names += [name for name in ("qweight", "quant_state", "scales") if name in _names_of(base)]
    names += [name for name in ("quant_state",) if not names and vars(base).get(name) is not None]
    foreign = [name for name in (package, tensor_package) if name in _QUANTISERS]
    if names or foreign:
        raise ExportError(
            f"The base of {layer.path} is quantised: {own_class(base).__name__} "
            f"({', '.join(names + foreign)}).",
            "Its numbers are packed: they are no weights that an adapter is added to, and what they stand "
            "for, on which the adapter was trained, is not the original that an engine has loaded.",
            "Load the base in bfloat16, or dequantise it (model.dequantize() of transformers): then it is "
            "sent in mode merged or adapter as any other.",
        )


def require_no_fake_quantisation(path: str, module: Any) -> None:
    """Raises ExportError for layers that train with quantised weights: merged ones would not be theirs."""
    cls = own_class(module)
    attributes = [
        name
        for name in ("weight_fake_quant", "weight_fake_quantizer")
        if getattr(module, name, None) is not None
    ]
    if attributes or _QAT.search(f"{cls.__module__}.{cls.__name__}"):
        raise ExportError(
            f"{path or 'The model'} is trained with fake quantisation ({cls.__name__}).",
            "LoRA and quantisation-aware training cannot be merged: the quantiser would round the adapter "
            "away or round twice.",
            "Train one of the two, or use mode full without adapters.",
        )


_QUANTISERS = frozenset(
    {"bitsandbytes", "torchao", "auto_gptq", "gptqmodel", "awq", "hqq", "aqlm", "eetq", "optimum", "quanto"}
)


def _kind(layer: PeftLayer) -> str:
    cls = own_class(layer.module)
    if cls.__module__ == _LORA and cls.__name__ in _KINDS:
        return cls.__name__
    if cls.__module__ == "peft.tuners.trainable_tokens.layer" and cls.__name__ == _TOKENS:
        return _TOKENS
    raise ExportError(
        f"{layer.path} is peft's {cls.__name__} ({cls.__module__}).",
        f"Only {', '.join(_KINDS)} of peft's LoRA can be merged here.",
        _FULL,
    )


def _of_layer(layer: PeftLayer, kind: str, adapters: Sequence[str]) -> list[str]:
    """Those of the adapters that the layer has."""
    matrices = {"Embedding": "lora_embedding_A", _TOKENS: "trainable_tokens_delta"}.get(kind, "lora_A")
    held = getattr(layer.module, matrices)
    return [adapter for adapter in adapters if adapter in held]


def _of_weight(layer: PeftLayer, kind: str, adapter: str, scaling: float) -> Change:
    module, path = layer.module, layer.path
    dora = adapter in module.lora_magnitude_vector
    if kind.startswith("Conv"):
        groups = getattr(_innermost(module), "groups", 1)
        if dora or groups != 1:
            raise ExportError(
                f"{path} is a convolution with {'DoRA' if dora else f'{groups} groups'}.",
                "How its adapter changes the weight is not known here.",
                _FULL,
            )
    if kind == "Embedding":
        names = [f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"]
    else:
        names = [f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"]
    if dora:
        names.append(f"lora_magnitude_vector.{adapter}.weight")
    transposed = kind == "Embedding" or bool(getattr(module, "fan_in_fan_out", False))
    return Change(LowRank(scaling, transposed, dora), tuple(f"{path}.{name}" for name in names))


def _of_parameter(
    layer: PeftLayer, adapter: str, scaling: float, base: Source, sources: Mapping[str, Source]
) -> Change:
    keys = (f"{layer.path}.lora_A.{adapter}.weight", f"{layer.path}.lora_B.{adapter}.weight")
    if len(base.shape) == 2:
        return Change(LowRank(scaling), keys)
    if any(key not in sources for key in keys):
        return Change(ExpertLowRank(scaling, base.shape[0], rows_in=True), keys)  # refused by the caller
    return Change(ExpertLowRank(scaling, base.shape[0], _reads_rows(layer, keys, base, sources)), keys)


def _reads_rows(layer: PeftLayer, keys: tuple[str, str], base: Source, sources: Mapping[str, Source]) -> bool:
    """Whether A reads the second axis of a parameter of experts: by shape, then by what peft says of it.

    Releases before 0.19 keep no word of it in the layer: theirs is the rule of the release itself.
    """
    module = layer.module
    experts, rows, columns = base.shape
    first, second = (sources[key].shape for key in keys)
    storage: Storage = "in-out" if getattr(_innermost(module), "is_transposed", False) else "out-in"
    try:
        order = axis_order(
            f"{layer.path}.{module.parameter_name}",
            parameter=(experts, rows, columns),
            storage=storage,
            first=first,
            second=second,
            peft_version=str(getattr(sys.modules.get("peft"), "__version__", "")),
        )
    except PlanError as error:
        raise ExportError(
            f"The matrices of {layer.path} have the shapes {list(first)} and {list(second)}.",
            f"{module.parameter_name} has the shape {list(base.shape)}, which they do not fit.",
            "Report this with the version of peft.",
        ) from error
    swapped = getattr(module, "_did_swap_in_out_features", None)
    if rows == columns and swapped is not None:
        return not swapped
    return (order == "as-named") == (storage == "in-out")


def _require_fitting(layer: PeftLayer, change: Change, base: Source, sources: Mapping[str, Source]) -> None:
    """Raises ExportError where matrices do not fit the weight: it was resized after it was wrapped."""
    if isinstance(change.step, TokenRows):
        _require_rows(layer, change.step, base)
    if not isinstance(change.step, LowRank) or len(base.shape) != 2:
        return
    first, second = (sources[key].shape for key in change.keys[:2])
    sides = (second[0], first[1])
    fitting = tuple(reversed(sides)) if change.step.transposed else sides
    if fitting != base.shape or first[0] != second[1]:
        raise ExportError(
            f"The matrices of {layer.path} are {list(first)} and {list(second)}.",
            f"Their product does not fit its weight, {list(base.shape)}.",
            "Wrap the model after its last change of size, for example of its vocabulary.",
        )


def _require_rows(layer: PeftLayer, step: TokenRows, base: Source) -> None:
    """Raises ExportError where a trained row is none of the embedding's: peft counts from the first alone."""
    beyond = [row for row in step.rows if not 0 <= row < base.shape[0]]
    if beyond:
        raise ExportError(
            f"{layer.path} trains row {beyond[0]}, and {len(beyond) - 1} more, of an embedding of "
            f"{base.shape[0]} rows.",
            "There is no such row, and peft's own forward fails on it.",
            "Name rows by token id, from 0, in trainable_token_indices.",
        )


def _trains_bias(module: Any, adapter: str) -> bool:
    return bool(getattr(module, "lora_bias", {}).get(adapter))  # peft before 0.14 knows none


def _innermost(module: Any) -> Any:
    found = module
    while (inner := found._modules.get("base_layer")) is not None:
        found = inner
    return found


def _names_of(module: Any) -> set[str]:
    return {*module._parameters, *module._buffers}
