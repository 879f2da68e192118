"""Failures that were reported upstream, each with what it should have been (`data/export_cases.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import llama, made, recipes_of, sources_of, wrapped
from torch import nn

from weightlane.errors import ExportError
from weightlane.export.deltas import LowRank
from weightlane.export.lora_layers import Change
from weightlane.export.merging import Merge
from weightlane.export.recipe import Source
from weightlane.export.recipes import recipes
from weightlane.export.rounding import RoundingLoss, note_merge
from weightlane.types import Phase

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data/export_cases.json").read_text())
}


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name]["input"], CASES[name]["expected"]


@pytest.mark.requirement("R6")
def test_ex_01_names_of_a_wrapped_state_are_cleaned_or_dropped() -> None:
    given, wanted = case("ex-01")
    model = wrapped(llama(), modules_to_save=["lm_head"])
    by_source = {recipe.sources[0]: recipe.name for recipe in recipes_of(model, Phase.MERGED)}
    assert {raw: by_source[raw] for raw in given["raw_names"] if raw in by_source} == wanted["result"]
    assert [raw for raw in given["raw_names"] if raw not in by_source] == wanted["dropped"]


@pytest.mark.requirement("R13")
def test_ex_06_an_adapter_is_chosen_by_name_also_where_it_is_frozen() -> None:
    from peft import LoraConfig

    given, wanted = case("ex-06")
    model = wrapped(llama(), "default", target_modules=["q_proj"])
    model.add_adapter(given["adapter"], LoraConfig(r=2, target_modules=["q_proj"]))
    frozen = [name for name, each in model.named_parameters() if ".old." in name and not each.requires_grad]
    assert frozen
    found = recipes_of(model, Phase.ADAPTER, given["adapter"])
    ending = next(iter(wanted["result"])).rpartition(".q.")[2]
    assert {recipe.sources[0] for recipe in found} == set(frozen)
    assert any(recipe.name.endswith(f"q_proj.{ending}") for recipe in found)
    assert all("lora_" in recipe.name and ".old." not in recipe.name for recipe in found)
    assert not [recipe.name for recipe in recipes_of(model, Phase.BASE) if "lora_" in recipe.name]


def test_ex_07_blocks_keep_their_prefixes_and_one_name_twice_is_an_error() -> None:
    given, wanted = case("ex-07")
    attention = {"q": nn.Linear(2, 2, bias=False)}
    blocks = [nn.ModuleDict({"attn": nn.ModuleDict(attention)}) for _ in given["blocks"]]
    assert list(made(nn.ModuleDict({"blocks": nn.ModuleList(blocks)}), Phase.FULL)) == wanted["result"]
    model = wrapped(llama())
    inner = model.base_model.model
    inner.original_head = inner.lm_head  # no wrapper of peft's: a second place of one tensor, two names
    assert "original_head.weight" in made(model, Phase.MERGED)
    sources = sources_of(model)
    sources["lm_head.weight"] = Source("lm_head.weight", (64, 32), "float32")
    with pytest.raises(ExportError, match=r"lm_head\.weight and lm_head\.weight are both lm_head\.weight"):
        recipes(model, sources, Phase.MERGED)


@pytest.mark.requirement("R1")
def test_te_03_what_is_loaded_after_unmerging_is_merged_and_the_base_is_as_before() -> None:
    given, wanted = case("te-03")
    base = torch.tensor([given["base"]])
    delta = torch.tensor([given["delta"]])
    merge = Merge((Change(LowRank(1.0), ("A", "B")),))
    taken = merge([base, delta, torch.ones(1, 1)])
    assert (taken.flatten().tolist(), base.flatten().tolist()) == (wanted["loaded"], wanted["after"])


def test_te_06_a_buffer_keeps_its_dtype_and_value() -> None:
    given, wanted = case("te-06")
    model = wrapped(llama(torch.bfloat16))
    value = torch.tensor([given["value"]])
    model.base_model.model.register_buffer("e_score_correction_bias", value)
    sent = made(model, Phase.MERGED)["e_score_correction_bias"]
    assert (str(sent.dtype), sent.item()) == (f"torch.{wanted['declared_dtype']}", wanted["value"])
    assert sent.to(torch.bfloat16).item() == wanted["bf16_would_give"]


def test_sp_04_an_update_that_rounding_swallows_is_told() -> None:
    given, wanted = case("sp-04")
    dtype = getattr(torch, given["dtype"])
    base = torch.tensor([[given["base"]]], dtype=dtype)
    merge = Merge((Change(LowRank(1.0), ("A", "B")),))
    loss = RoundingLoss()
    with loss.measured():
        sent = merge([base, torch.tensor([[given["delta"]]]), torch.ones(1, 1)])
    assert (sent.item(), loss.update_lost) == (wanted["merged_bf16"], 1.0)
    note_merge(base, base, base)  # outside: nobody measures
    assert loss.tensors == 1
