"""A checkpoint folder tells its tensors without one weight being read; a damaged one is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from weightlane.checkpoint_folder import read_checkpoint_folder
from weightlane.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"architectures": ["FakeForCausalLM"], "model_type": "fake"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_two_files(folder: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"b.bias": torch.zeros(4), "not.listed": torch.zeros(1)}, folder / "two.safetensors")
    weights = {"a.weight": "one.safetensors", "b.bias": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_one_file_and_an_index_of_several_give_what_they_hold(folder: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, folder / "model.safetensors", {"format": "pt"})
    (one,) = read_checkpoint_folder(folder).manifest.tensors
    assert (one.name, one.shape, one.dtype) == ("a", (2,), "float16")
    write_two_files(folder)
    found = read_checkpoint_folder(folder)
    assert (found.architecture, found.stored) == ("FakeForCausalLM", True)
    assert [(item.name, item.shape, item.dtype) for item in found.manifest.tensors] == [
        ("a.weight", (2, 3), "bfloat16"),
        ("b.bias", (4,), "float32"),
    ]


def test_no_weight_is_read(folder: Path) -> None:
    write_two_files(folder)
    path = folder / "one.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])  # the header alone
    assert len(read_checkpoint_folder(folder).manifest.tensors) == 2


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", b"[", "cannot be used"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../one"}}', "which is no file beside it"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone"}}', "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"c": "two.safetensors"}}', "c is not in the file"),
        ("one.safetensors", b"\xff" * 16, "header would be"),
        ("one.safetensors", b"\x02" + b"\0" * 7 + b"[]", "object"),
    ],
)
def test_what_is_damaged_is_named(folder: Path, name: str, content: bytes, told: str) -> None:
    write_two_files(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=told):
        read_checkpoint_folder(folder)


@pytest.mark.parametrize(("dtype", "shape"), [("F99", [1]), ("F32", [-1])])
def test_a_tensor_that_cannot_be_is_named(folder: Path, dtype: str, shape: list[int]) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be used: a "):
        read_checkpoint_folder(folder)


def test_a_folder_without_a_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_checkpoint_folder(tmp_path)
