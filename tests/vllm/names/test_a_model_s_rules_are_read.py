"""A live model's mapper becomes data, and that data maps names as the mapper does."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec
import pytest
import torch

from weightlane.receiver import NameRules
from weightlane_vllm.mapper import NameMapper, read_rules


class FakeModel(torch.nn.Module):
    """A module with a mapper like vLLM's, and experts whose loader looks for a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Identity()
        self.experts.lora_base_layer_prefix = "base_layer."  # type: ignore[assignment]
        self.hf_to_vllm_mapper = SimpleNamespace(
            orig_to_new_renaming=[
                SimpleNamespace(
                    source_patterns=["^embed_out"], target_patterns=["lm_head"], scope_prefix=None
                ),
                SimpleNamespace(source_patterns=["norm"], target_patterns=["other"], scope_prefix="vision"),
            ],
            orig_to_new_regex={re.compile(r"^h\.(\d+)\."): r"layers.\1.", re.compile("rotary"): None},
            orig_to_new_substr={".attention.": ".self_attn."},
            orig_to_new_stacked={".q_proj.": (".qkv_proj.", "q")},
            orig_to_new_prefix={"model.": "language_model.model.", "mtp.": None},
            orig_to_new_suffix={".gamma": ".weight"},
        )


@pytest.mark.parametrize(
    ("name", "mapped", "renamed"),
    [
        ("embed_out.weight", "lm_head.weight", "lm_head.weight"),
        ("h.3.norm.gamma", "layers.3.norm.weight", "layers.3.norm.weight"),
        ("h.3.rotary.inv_freq", None, None),
        (
            "model.attention.q_proj.weight",
            "language_model.model.self_attn.qkv_proj.weight",
            "language_model.model.self_attn.q_proj.weight",
        ),
        ("x.model.norm.weight", "x.model.norm.weight", "x.model.norm.weight"),
    ],
)
def test_each_table_is_read_and_applied(name: str, mapped: str | None, renamed: str | None) -> None:
    model = FakeModel()
    sent = msgspec.msgpack.encode(read_rules(model, wrapper_loads=False))
    rules = msgspec.msgpack.decode(sent, type=NameRules)
    prefixes = model.hf_to_vllm_mapper.orig_to_new_prefix
    mapper = NameMapper(rules.patterns, rules.substrings, rules.stacked, prefixes, rules.suffixes)
    assert (mapper.mapped(name), mapper.renamed(name)) == (mapped, renamed)
    assert NameMapper(prefixes=prefixes).mapped("mtp.fc.weight") is None


def test_the_prefix_of_the_expert_loader_and_the_kind_of_wrapper_are_told() -> None:
    told = read_rules(FakeModel(), wrapper_loads=False)
    assert (told.expert_prefix, told.wrapper_loads) == ("base_layer.", False)
    assert read_rules(torch.nn.Linear(2, 2), wrapper_loads=True) == NameRules()
