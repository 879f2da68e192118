"""LoRA blocks of Megatron trainers and folders that peft saved become the same declaration as an object."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightlane.errors import PlanError, UsageError
from weightlane.manifest import TensorSpec
from weightlane.peft import LoraDeclaration, adapter_config_of, declared_lora, lora_name
from weightlane.peft.adapter_folder import read_adapter_folder
from weightlane.peft.engine_targets import TargetWords, engine_targets

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class LoRA:
    """The fields of Megatron-Bridge 0.6's class of this name."""

    target_modules: list[str] = field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    exclude_modules: list[str] = field(default_factory=list)
    dim: int = 32
    alpha: int = 32
    dropout: float = 0.0
    dropout_position: str = "pre"
    lora_A_init_method: str = "xavier"  # noqa: N815 - Bridge's name
    lora_B_init_method: str = "zero"  # noqa: N815
    a2a_experimental: bool = False
    lora_dtype: Any = None
    normalize_moe_lora: bool = False
    share_expert_adapters: bool = True


class DoRA(LoRA):
    """Bridge tells it from LoRA by its class alone."""


def pair(module: str, rank: int) -> list[TensorSpec]:
    shapes = (("A", (rank, 6)), ("B", (6, rank)))
    return [TensorSpec(lora_name(module, side), shape, "bfloat16") for side, shape in shapes]


def test_a_bridge_block_names_the_checkpoint_s_modules() -> None:
    declared = declared_lora(LoRA(dim=8, alpha=16))
    assert (declared.rank, declared.alpha, declared.source) == (8, 16.0, "megatron")
    assert set(declared.target_modules or ()) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert declared == declared_lora(vars(LoRA(dim=8, alpha=16)))
    assert msgspec.json.decode(msgspec.json.encode(declared), type=LoraDeclaration) == declared
    config = adapter_config_of(declared, name="p", tensors=pair("model.layers.0.self_attn.q_proj", 8))
    assert (config.rank, config.scaling) == (8, 2.0)


def test_single_modules_wildcards_and_exclusions_are_translated() -> None:
    canonical = ["linear_q", "linear_fc1_up", "*.layers.0.*.linear_fc2"]
    declared = declared_lora(LoRA(target_modules=canonical, exclude_modules=["linear_proj"]))
    assert set(declared.target_modules or ()) == {"q_proj", "up_proj", "down_proj"}
    assert declared.exclude_modules == ("o_proj",)
    with pytest.raises(PlanError, match=r"'linear_qvk' names no linear module.*Near: .*linear_qkv"):
        declared_lora(LoRA(target_modules=["linear_qvk"]))


@pytest.mark.requirement("R18", part="Megatron's block and peft's say the same")
@pytest.mark.requirement("R27", part="the rank of a block")
def test_the_block_of_a_framework_says_the_same_as_peft() -> None:
    block = {
        "type": "lora",
        "rank": 8,
        "alpha": 16,
        "dropout": 0.1,
        "target_modules": "all-linear",
        "merge": False,
    }
    declared = declared_lora(block)
    assert (declared.rank, declared.alpha, declared.target_modules) == (8, 16.0, "all-linear")
    assert engine_targets(declared.target_modules, TargetWords("sglang", "all")) == ("all",)
    tensors = pair("model.layers.0.mlp.up_proj", 8)
    peft = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert adapter_config_of(block, name="p", tensors=tensors) == adapter_config_of(
        peft, name="p", tensors=tensors
    )


@pytest.mark.parametrize("block", [DoRA(), {"type": "dora", "rank": 8, "alpha": 16}])
def test_a_block_of_dora_asks_for_it(block: Any) -> None:
    assert declared_lora(block).features == {"use_dora": True}


def test_ranks_that_the_block_divides_among_experts_are_read_from_the_matrices() -> None:
    tensors = [*pair("layers.0.self_attn.q_proj", 8), *pair("layers.0.mlp.experts.0.up_proj", 2)]
    with pytest.raises(PlanError, match=r"shape is \[2, 6\], and the configuration's rank is 8"):
        adapter_config_of(LoRA(dim=8, alpha=16), name="p", tensors=tensors)
    config = adapter_config_of(LoRA(dim=8, alpha=16, normalize_moe_lora=True), name="p", tensors=tensors)
    assert [lora.scaling for lora in config.modules.values()] == [2.0, 8.0]


@pytest.mark.requirement("R27", part="0 and None mean no LoRA")
@pytest.mark.parametrize("rank", [0, None, "8", True])
def test_a_block_without_a_rank_is_no_adapter(rank: Any) -> None:
    with pytest.raises(PlanError, match="not a whole number above 0"):
        declared_lora({"rank": rank, "alpha": 16})


def test_everything_that_cannot_be_read_is_told_at_once() -> None:
    block = {"type": "loha", "rank": 8, "alpha": "16", "of_a_later_release": 1, "target_modules": [1]}
    with pytest.raises(PlanError) as caught:
        declared_lora(block)
    assert [problem.subject for problem in caught.value.problems] == [
        *("of_a_later_release", "type", "alpha", "target_modules")
    ]
    fields: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "("}
    fields |= {"rank_pattern": {"a": 0, "(": 2}, "alpha_pattern": ["a"], "layers_to_transform": "all"}
    fields["exclude_modules"] = 3
    with pytest.raises(PlanError) as caught:
        declared_lora(fields)
    assert {problem.subject for problem in caught.value.problems} == {
        *("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform")
    }
    for other in (3, None):
        with pytest.raises(PlanError, match="neither a configuration object nor a mapping"):
            declared_lora(other)


# -- folders ---------------------------------------------------------------------------------------------

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "peft_version": "0.19.1",
}


def save(folder: Path, config: Any = CONFIG, *, weights: bool = True) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        tensors = {lora_name("q_proj", "A"): torch.ones(2, 6), lora_name("q_proj", "B"): torch.ones(6, 2)}
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_folder_gives_configuration_and_tensors_without_reading_data(tmp_path: Path) -> None:
    found = read_adapter_folder(save(tmp_path / "a"))
    assert found.adapter("policy").modules.keys() == {"q_proj"}
    assert found.declaration.peft_version == "0.19.1"
    path = tmp_path / "a" / "adapter_model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)  # data that nobody looks at
    assert read_adapter_folder(tmp_path / "a").tensors == found.tensors


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", weights=False)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match=r"adapter_model\.bin is not read.*runs code.*safe_serialization"):
        read_adapter_folder(folder)


def test_what_is_missing_damaged_or_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"adapter_config\.json cannot be read"):
        read_adapter_folder(tmp_path)
    folder = save(tmp_path / "a", weights=False)
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors cannot be read"):
        read_adapter_folder(folder)
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="is no regular file"):
        read_adapter_folder(folder)
    with pytest.raises(UsageError, match=r"adapter_config\.json cannot be used"):
        read_adapter_folder(save(tmp_path / "b", "{"))
    with pytest.raises(PlanError, match="no peft_type; it has r"):
        read_adapter_folder(save(tmp_path / "c", {"r": 2}))
    (save(tmp_path / "d") / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="its header would be"):
        read_adapter_folder(tmp_path / "d")
