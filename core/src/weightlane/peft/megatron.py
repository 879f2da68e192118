"""LoRA blocks of Megatron trainers as declarations: Megatron-Bridge's classes and verl's configuration block.

Bridge writes `dim` and `alpha`, verl `rank` and `alpha`, and both name Megatron's fused modules. The names
are turned into those of the checkpoint's modules; which of them exist is read from the tensors.
Bridge scales by alpha over the rank of each adapter, and with `normalize_moe_lora` the rank of experts is
`dim` over the experts per token, so that the matrices themselves say each module's rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import Problem, near_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.peft.declared import LoraDeclaration

CHECKPOINT_MODULES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Checkpoint leaf names of Megatron's linear modules: LoRA's fused ones, CanonicalLoRA's single ones."""

_READ = frozenset({"alpha", "dim", "exclude_modules", "normalize_moe_lora", "rank", "target_modules", "type"})
_TRAINING_ALONE = frozenset(
    {
        *("a2a_experimental", "adapter_path", "canonical_mapping", "dropout", "dropout_position", "dtype"),
        *("freeze_language_model", "freeze_vision_model", "freeze_vision_projection", "fully_sharded_loras"),
        *("lora_A_init_method", "lora_B_init_method", "lora_dtype", "merge", "params_to_save"),
        "share_expert_adapters",
    }
)
_KINDS = frozenset({"", "lora", "canonical_lora", "vlm_lora", "dora"})


def is_megatron_block(fields: Mapping[str, Any]) -> bool:
    """Whether these are fields of such a block and not of a peft configuration."""
    return "alpha" in fields and not {"peft_type", "r"} & set(fields) and bool({"dim", "rank"} & set(fields))


def read_megatron_block(
    fields: Mapping[str, Any], class_name: str = ""
) -> tuple[LoraDeclaration, list[Problem]]:
    """The block as a declaration, and everything in it that cannot be read.

    Args:
        fields: plain values by key.
        class_name: of the object they were read from; Bridge tells DoRA from LoRA by class alone.
    """
    from weightlane.peft.declared import FieldReader, LoraDeclaration

    problems: list[Problem] = [
        Problem("peft-config", key, f"it is {value!r}, and this weightlane does not know what it changes")
        for key, value in fields.items()
        if value and key not in _READ | _TRAINING_ALONE
    ]
    reader = FieldReader(fields, problems)
    kind = str(fields.get("type") or "").lower()
    if kind not in _KINDS:
        what = f"it is {kind!r}; known are {', '.join(sorted(_KINDS - {''}))}"
        problems.append(Problem("peft-config", "type", what, near=near_names(kind, _KINDS)))
    declaration = LoraDeclaration(
        rank=reader.rank("dim" if "dim" in fields else "rank"),
        alpha=reader.number("alpha"),
        target_modules=_checkpoint_names("target_modules", reader.names("target_modules"), problems),
        exclude_modules=_checkpoint_names("exclude_modules", reader.names("exclude_modules"), problems),
        features={"use_dora": True} if kind == "dora" or class_name == "DoRA" else {},
        task_type="CAUSAL_LM",
        ranks_by_tensor=bool(fields.get("normalize_moe_lora")),
        source="megatron",
    )
    return declaration, problems


def _checkpoint_names(
    key: str, names: tuple[str, ...] | str | None, problems: list[Problem]
) -> tuple[str, ...] | str | None:
    """Checkpoint leaf names of Megatron's; a string stays whole, for `all-linear` and for a regex."""
    if names is None or isinstance(names, str):
        return names
    found: dict[str, None] = {}
    for name in names:
        # Bridge's targets may have wildcards before the leaf (`*.layers.0.*.linear_qkv`).
        leaf = name.rpartition(".")[2]
        known = CHECKPOINT_MODULES.get(leaf) or ((leaf,) if leaf in _OTHER_NAMES else ())
        if not known:
            what = f"{name!r} names no linear module of Megatron's that has a checkpoint name"
            near = near_names(leaf, CHECKPOINT_MODULES)
            problems.append(Problem("peft-config", key, what, near=near))
        found.update(dict.fromkeys(known))
    return tuple(found)


_OTHER_NAMES = frozenset(name for names in CHECKPOINT_MODULES.values() for name in names)
