from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightlane.checkpoint import checkpoint_tensors_of_model
from weightlane.checkpoint_renames import renamed_once, reversed_renames

REPORT: dict[str, Any] = next(
    case
    for case in json.loads((Path(__file__).parents[1] / "data" / "name_cases.json").read_text())
    if case["id"] == "vm-08"
)
DECLARED = {"^visual": "model.visual", r"^model(?!\.(language_model|visual))": "model.language_model"}


def test_a_name_in_the_other_form_already_is_left_alone() -> None:
    rules = {rule["match"].lstrip("^"): rule["to"] for rule in REPORT["input"]["reverse_rules"]}
    once = [renamed_once(name, rules) for name in REPORT["input"]["names"]]
    assert once == REPORT["expected"]["result"]
    assert [renamed_once(name, rules) for name in once] == once


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("visual.proj.weight", "model.visual.proj.weight"),
        ("model.visual.proj.weight", "model.visual.proj.weight"),
        ("model.layers.0.weight", "model.language_model.layers.0.weight"),
        ("model.language_model.layers.0.weight", "model.language_model.layers.0.weight"),
        ("models.layers.0.weight", "models.layers.0.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_whole_parts_are_renamed_whatever_the_order_of_the_table(name: str, renamed: str, order: int) -> None:
    prefixes = dict([("visual", "model.visual"), ("model", "model.language_model")][::order])
    assert renamed_once(name, prefixes) == renamed
    assert renamed_once(renamed, prefixes) == renamed


def test_a_declared_table_is_turned_round_without_what_its_patterns_exclude() -> None:
    assert reversed_renames(DECLARED) == {"model.visual": "visual", "model.language_model": "model"}


class FakeVisionModel(SimpleNamespace):
    """A model of transformers 4 that keeps its towers under other names than its checkpoint."""

    _checkpoint_conversion_mapping = DECLARED

    def state_dict(self, *, keep_vars: bool) -> dict[str, torch.Tensor]:
        return {
            "model.visual.proj.weight": torch.zeros(2),
            "model.language_model.norm.weight": torch.zeros(3),
            "lm_head.weight": torch.zeros(4),
        }


def test_with_transformers_4_the_declared_prefixes_give_the_checkpoint_s_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    found = {item.canonical: item.shape for item in checkpoint_tensors_of_model(FakeVisionModel())}
    assert found == {"visual.proj.weight": (2,), "model.norm.weight": (3,), "lm_head.weight": (4,)}
