"""What an adapter may ask of an engine beyond one rank and one scale: the one table of what needs what.

A feature is called by peft's own key. An engine's `AdapterExpression.carries` lists those that it takes; any
other is refused by name, with the mode that could carry it. A key that this table does not know, and that has
a value, is refused at once: nobody knows what it changes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from weightlane.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

MERGED = "Mode merged could carry it."
IN_TRAINER = "Mode full could carry it once the trainer has merged it (merge_and_unload)."
"""For what peft merges in a way of its own, which `weightlane.export.lora_layers` refuses to guess."""

NO_MODE = "No mode could carry it: it is no change of weights alone."


def _is_not_none_word(value: Any) -> bool:
    return value not in (None, "none", "")


def _changes_the_base(value: Any) -> bool:
    return isinstance(value, str) and value.lower().startswith(
        ("pissa", "olora", "corda", "loftq", "lora_ga")
    )


class Feature(NamedTuple):
    """What it is, which mode could carry it, when a value asks for it, and names of tensors of its own."""

    what: str
    mode: str
    asked_by: Callable[[Any], bool] = bool
    tensors: str = ""


FEATURES: dict[str, Feature] = {
    "rank_pattern": Feature("modules have ranks of their own", MERGED),
    "alpha_pattern": Feature("modules have scales of their own", MERGED),
    "bias": Feature("trained biases are no part of an adapter here", MERGED, _is_not_none_word),
    "lora_bias": Feature(
        "the matrices have biases",
        "Mode merged could carry it where the layers have biases too.",
        tensors=r"\.lora_B\.bias",
    ),
    "use_dora": Feature(
        "DoRA also scales each output by a learned magnitude",
        MERGED,
        tensors=r"\.lora_magnitude_vector(\.weight)?",
    ),
    "modules_to_save": Feature("whole modules are trained beside the matrices", MERGED),
    "target_parameters": Feature("parameters that are no linear module's weight are adapted", MERGED),
    "trainable_token_indices": Feature("rows of an embedding are trained beside the matrices", MERGED),
    "fan_in_fan_out": Feature("the adapted weights are stored transposed", MERGED),
    "init_lora_weights": Feature(
        "it changed the base weights when training began", MERGED, _changes_the_base
    ),
    "layer_replication": Feature(
        "the trainer's model has layers more than its checkpoint",
        "Mode merged could carry it to an engine whose model has these layers.",
    ),
    "use_qalora": Feature("inputs are pooled before the first matrix", NO_MODE),
    "use_bdlora": Feature("the matrices are block-diagonal", IN_TRAINER),
    "alora_invocation_tokens": Feature("it acts on some tokens only", NO_MODE),
    "arrow_config": Feature("it routes between adapters", NO_MODE),
    "velora_config": Feature("the matrices are trained in a way of its own", MERGED),
    "monteclora_config": Feature("what it adds to the matrices is not known here", IN_TRAINER),
    "kasa_config": Feature("it adds a singular-value diagonal between the matrices", IN_TRAINER),
    "ensure_weight_tying": Feature("tied modules share matrices", MERGED),
}

READ_ELSEWHERE = frozenset(
    {
        *("exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type"),
        *("peft_version", "r", "target_modules", "task_type", "use_rslora", "base_model_name_or_path"),
    }
)
"""Keys that a declaration has fields for."""

WITHOUT_MEANING_HERE = frozenset(
    {
        *("auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size", "revision"),
        "runtime_config",
    }
)
"""How training starts and runs: nothing of it changes what an engine computes with the matrices."""

_IN_THE_MODULES = frozenset({"rank_pattern", "alpha_pattern"})


def asked_features(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The features that a configuration's fields ask for, with their values; ranks and scales left out."""
    return {
        key: value
        for key, value in fields.items()
        if key in FEATURES and key not in _IN_THE_MODULES and FEATURES[key].asked_by(value)
    }


def unknown_fields(fields: Mapping[str, Any]) -> list[Problem]:
    """Fields that nobody here knows, unless they are empty."""
    return [
        Problem(
            "peft-config",
            key,
            f"it is {value!r}, and this weightlane does not know what it changes",
            f"Leave it out. {IN_TRAINER}",
        )
        for key, value in fields.items()
        if value and key not in FEATURES and key not in READ_ELSEWHERE | WITHOUT_MEANING_HERE
    ]


def refused_features(needs: Mapping[str, str], carries: Collection[str], *, receiver: str) -> list[Problem]:
    """What an adapter needs and an engine does not carry, each with the mode that could.

    Args:
        needs: of the adapter (`AdapterConfig.needs`).
        carries: of the engine's expression.
        receiver: how to call the engine.
    """
    return [
        Problem(
            "peft-config",
            key,
            f"it is {value}: {FEATURES[key].what}, which {receiver} does not carry"
            if key in FEATURES
            else f"it is {value}, which {receiver} does not carry",
            FEATURES[key].mode if key in FEATURES else IN_TRAINER,
        )
        for key, value in needs.items()
        if key not in carries
    ]


def explains(features: Collection[str], tensor: str) -> bool:
    """Whether a tensor that is no LoRA matrix belongs to one of these features."""
    return any(
        key in FEATURES and FEATURES[key].tensors and re.search(rf"{FEATURES[key].tensors}$", tensor)
        for key in features
    )
