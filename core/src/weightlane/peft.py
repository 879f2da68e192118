"""The adapter schema: any LoRA configuration, read once at the edge, to one frozen `AdapterConfig`.

Names of adapter tensors are those of peft's own checkpoint file (`adapter_model.safetensors`): the
wrapper's prefix, the module's checkpoint name, `lora_A` or `lora_B`, and `weight`; the adapter's name is no
part of them. So an export, a folder that peft saved and a folder that is pushed all agree, and an engine that
reads such folders takes the names as they are. The library itself is never imported here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from weightlane.errors import PlanError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightlane.manifest import TensorSpec

WRAPPER_PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""

_LORA_NAME = re.compile(rf"{re.escape(WRAPPER_PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plain LoRA adapter: each target module adds `scaling * (B @ A)` to its weight.

    `alpha` is the one of plain LoRA, such that `alpha / rank` is the scale: rank-stabilised LoRA is folded
    into it, so that an engine that ignores `use_rslora` (SGLang does) scales rightly too. `target_modules`
    are the modules that tensors exist for, by checkpoint name without a wrapper's prefix, in export order:
    never a pattern and never a keyword such as `all-linear`.
    """

    name: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied with."""
        return self.alpha / self.rank


class LoraName(NamedTuple):
    """A parsed tensor name. Side A is (rank, in), side B (out, rank)."""

    module: str
    side: Literal["A", "B"]


def parse_lora_name(name: str) -> LoraName | None:
    """Module and side of a canonical adapter tensor; None for any other name."""
    found = _LORA_NAME.fullmatch(name)
    return LoraName(found["module"], "A" if found["side"] == "A" else "B") if found else None


def lora_name(module: str, side: Literal["A", "B"]) -> str:
    """The canonical name of one matrix of a module."""
    return f"{WRAPPER_PREFIX}{module}.lora_{side}.weight"


def peft_json(config: AdapterConfig) -> str:
    """The configuration as JSON with peft's own keys, for engines that read those."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(config.target_modules),
    }
    return msgspec.json.encode(fields).decode()


class _Refusal(NamedTuple):
    what: str
    mode: str
    refused: Callable[[Any], bool] = bool


def _is_not_none_word(value: Any) -> bool:
    return value not in (None, "none")


def _changes_the_base(value: Any) -> bool:
    return isinstance(value, str) and value.lower().startswith(
        ("pissa", "olora", "corda", "loftq", "lora_ga")
    )


_MERGED = "Mode merged could carry it."
_FULL = "Mode full could carry it: it sends the weights as the trainer holds them."
_NO_MODE = "No mode could carry it: it is no change of weights alone."

_REFUSALS: dict[str, _Refusal] = {
    "bias": _Refusal("trained biases are no part of an adapter here", _MERGED, _is_not_none_word),
    "lora_bias": _Refusal("biases of the matrices are no part of an adapter here", _MERGED),
    "use_dora": _Refusal("DoRA also scales each output by a learned magnitude", _MERGED),
    "rank_pattern": _Refusal("modules have ranks of their own", _MERGED),
    "alpha_pattern": _Refusal("modules have scales of their own", _MERGED),
    "modules_to_save": _Refusal("whole modules are trained beside the matrices", _MERGED),
    "target_parameters": _Refusal("parameters that are no linear module's weight are adapted", _MERGED),
    "trainable_token_indices": _Refusal("rows of an embedding are trained beside the matrices", _MERGED),
    "fan_in_fan_out": _Refusal("the adapted weights are stored transposed", _MERGED),
    "init_lora_weights": _Refusal(
        "it changed the base weights when training began", _MERGED, _changes_the_base
    ),
    "layer_replication": _Refusal("the trainer's model has layers more than its checkpoint", _FULL),
    "use_qalora": _Refusal("inputs are pooled before the first matrix", _NO_MODE),
    "use_bdlora": _Refusal("the matrices are block-diagonal", _MERGED),
    "alora_invocation_tokens": _Refusal("it acts on some tokens only", _NO_MODE),
    "arrow_config": _Refusal("it routes between adapters", _NO_MODE),
    "velora_config": _Refusal("weightlane does not know it", _MERGED),
    "monteclora_config": _Refusal("weightlane does not know it", _MERGED),
    "kasa_config": _Refusal("it adds a singular-value diagonal between the matrices", _MERGED),
    "ensure_weight_tying": _Refusal("tied modules share matrices", _MERGED),
}

# How training starts and runs; which modules were chosen is read from the tensors.
_WITHOUT_MEANING_HERE = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
        "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
        "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip


def adapter_config_of(config: object, *, name: str, tensors: Sequence[TensorSpec]) -> AdapterConfig:
    """The frozen form of a LoRA configuration and the tensors that belong to it.

    Args:
        config: a peft configuration object or a mapping with its keys (`adapter_config.json`, say).
        name: the adapter's name.
        tensors: what is exported, under canonical names.

    Raises:
        PlanError: every feature that an adapter cannot carry here, each with the mode that could, and every
            tensor that is no matrix of this adapter.
    """
    fields = _fields_of(config)
    problems = _type_problems(fields) + _feature_problems(fields)
    rank = fields.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(Problem("peft-config", "r", f"the rank is {rank!r}, not a whole number above 0"))
        rank = 0
    alpha = fields.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        problems.append(Problem("peft-config", "lora_alpha", f"it is {alpha!r}, not a number"))
        alpha = 0.0
    modules, tensor_problems = _modules_of(tensors, rank)
    problems += tensor_problems
    if problems:
        raise PlanError(problems)
    plain = alpha * math.sqrt(rank) if fields.get("use_rslora") else alpha
    return AdapterConfig(name, rank, float(plain), modules)


def _fields_of(config: object) -> dict[str, Any]:
    # vars, since to_dict of some peft releases fails on their own fields.
    found = dict(config) if isinstance(config, Mapping) else vars(config)
    return {
        str(key): value.value if isinstance(value, Enum) else value
        for key, value in found.items()
        if not str(key).startswith("_")
    }


def _type_problems(fields: Mapping[str, Any]) -> list[Problem]:
    kind = fields.get("peft_type")
    if kind == "LORA":
        return []
    if kind is None:
        what = f"the configuration has no peft_type; it has {', '.join(sorted(fields)) or 'no keys'}"
        return [Problem("peft-config", "peft_type", what, "Give the configuration that peft made.")]
    return [Problem("peft-config", "peft_type", f"{kind} adapters cannot be carried; LORA can", _MERGED)]


def _feature_problems(fields: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    for key, value in fields.items():
        refusal = _REFUSALS.get(key)
        if refusal is not None and refusal.refused(value):
            problems.append(Problem("peft-config", key, f"it is {value!r}: {refusal.what}", refusal.mode))
        elif refusal is None and key not in _WITHOUT_MEANING_HERE and value:
            what = f"it is {value!r}, and this weightlane does not know what it changes"
            problems.append(Problem("peft-config", key, what, "Leave it out, or use mode merged."))
    return problems


def _modules_of(tensors: Iterable[TensorSpec], rank: int) -> tuple[tuple[str, ...], list[Problem]]:
    """The modules that both matrices exist for; whatever is no such matrix is a problem."""
    problems: list[Problem] = []
    sides: dict[str, set[str]] = {}
    for spec in tensors:
        parsed = parse_lora_name(spec.name)
        if parsed is None:
            what = "it belongs to the adapter and is no matrix of a linear module"
            problems.append(Problem("adapter-tensor", spec.name, what, _MERGED))
            continue
        sides.setdefault(parsed.module, set()).add(parsed.side)
        inner = spec.shape[0 if parsed.side == "A" else -1] if len(spec.shape) == 2 else None
        if rank and inner != rank:
            what = f"its shape is {list(spec.shape)}, and the configuration's rank is {rank}"
            problems.append(Problem("adapter-tensor", spec.name, what, _MERGED))
    for module, found in sides.items():
        if len(found) == 1:
            missing = ({"A", "B"} - found).pop()
            problems.append(Problem("adapter-tensor", module, f"it has no lora_{missing} matrix"))
    if not sides and not problems:
        problems.append(Problem("adapter-tensor", "adapter", "it has no tensors, so nothing could be bound"))
    return tuple(sides), problems
