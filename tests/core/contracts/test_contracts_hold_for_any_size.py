"""A contract says what the loader does, and nothing that follows from how large a model is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from weightlane.trace.contract_making import contract_from_tables
from weightlane.trace.contract_text import contract_text
from weightlane.trace.patterns import alike, fill, layers_in_words, meant_by, numbered

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable

LARGER = {"layers": 5, "hidden": 16, "inner": 40, "query": 32, "key": 8, "experts": 6, "vocab": 20}


@pytest.mark.parametrize("workers", [1, 2])
def test_two_sizes_of_one_architecture_have_the_same_text(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract], workers: int
) -> None:
    small = contract_text(contract_of(fake_config(workers=workers)))
    assert contract_text(contract_of(fake_config(workers=workers, **LARGER))) == small


def test_what_the_loader_does_is_in_the_text(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    lines = contract_text(contract_of(fake_config(workers=2))).split("\n")
    for short in (
        "tensor parallel  2",
        "model.embed_tokens.weight -> model.embed_tokens.weight: whole, split by rows, padded",
        "L.self_attn.k_proj.weight -> L.self_attn.qkv_proj.weight: rows 2 of 3, split by rows",
        "L.self_attn.o_proj.weight -> L.self_attn.o_proj.weight: whole, split by columns",
        "L.input_layernorm.weight -> L.input_layernorm.weight: whole",
        "L.mlp.up_proj.weight (layer 0) -> L.mlp.gate_up_proj.weight: rows 2 of 2, split by rows",
        "E.up_proj.weight (layers 1 on) -> F.w13_weight: slice {expert} rows 2 of 2, split by rows",
        "B (layers 1 on) -> B: whole, as float32",
        "L.mlp.gate_up_proj.weight <- L.mlp.gate_proj.weight, L.mlp.up_proj.weight",
        "rotary: a buffer that no checkpoint holds: the engine makes it itself",
    ):
        line = re.sub(r"\bE\b", "L.mlp.experts.{expert}", short)
        line = re.sub(r"\bF\b", "L.mlp.experts", line)
        line = re.sub(r"\bB\b", "L.mlp.gate.e_score_correction_bias", line)
        line = re.sub(r"\bL\b", "model.layers.{layer}", line)
        assert line in lines, line


def test_lines_follow_the_engine_and_not_the_trainer(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = contract_of(fake_config())
    found = contract_of.__globals__["checkpoint_of"]
    monkeypatch.setitem(
        contract_of.__globals__, "checkpoint_of", lambda config: dict(sorted(found(config).items()))
    )
    assert list(found(fake_config())) != sorted(found(fake_config()))
    assert contract_of(fake_config()) == straight


def test_what_is_not_covered_or_dropped_is_said(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    tied = contract_of(fake_config(tied=True))
    assert tied.lines[-1].dropped == "the receiver reads model.embed_tokens.weight for it"
    assert [(note.target, note.what) for note in tied.aliases] == [
        ("model.embed_tokens.weight", "lm_head.weight")
    ]
    torn = contract_of(fake_config(), leave=("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"))
    assert [(note.target, note.layers, note.what) for note in torn.uncovered] == [
        ("model.layers.{layer}.self_attn.qkv_proj.weight", "1 on", "partly written by nothing"),
        ("model.norm.weight", "all", "written by nothing"),
    ]


@pytest.mark.parametrize(
    ("layers", "every", "words"),
    [
        ([0, 1, 2], [0, 1, 2], "all"),
        ([0], [0, 1, 2], "0"),
        ([1, 2], [0, 1, 2], "1 on"),
        ([1], [0, 1], "1 on"),
        ([1, 3, 5], [0, 1, 2, 3, 4, 5], "1 and every 2 on"),
        ([0, 1, 2], [0, 1, 2, 3], "up to 2"),
        ([0, 3, 4], [0, 1, 2, 3, 4, 5], "0 3 4"),
    ],
)
def test_layers_are_put_into_words_that_mean_them(layers: list[int], every: list[int], words: str) -> None:
    assert layers_in_words(layers, every) == words
    assert [number for number in every if meant_by(words, number)] == layers
    assert meant_by(words, None) is (words == "all")


def test_names_come_apart_and_together() -> None:
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    key = numbered(name)
    assert (key.pattern, key.layer, key.expert) == (
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        3,
        7,
    )
    assert fill(key.pattern, key) == name
    assert alike("layers.3.experts.w13_weight", key) == "layers.{layer}.experts.w13_weight"
    assert alike("draft.layers.0.w2", key) == "draft.layers.0.w2"
    every = numbered("b.1.experts.2.lin.3.007")
    assert every.pattern == "b.{layer}.experts.{expert}.lin.{within}.007"


def test_what_layers_share_is_told_for_any_number_of_them(
    traced: Callable[..., tuple[PlacementTable, ...]], fake_config: Callable[..., Any]
) -> None:
    def sharing(layers: int) -> str:
        (table,) = traced(fake_config(layers=layers))
        others = tuple(f"layers.{number}.rotary" for number in range(1, layers))
        targets = tuple(
            msgspec.structs.replace(item, name="layers.0.rotary", aliases=others)
            if item.name == "rotary"
            else item
            for item in table.targets
        )
        return contract_text(contract_from_tables((msgspec.structs.replace(table, targets=targets),), {}))

    assert sharing(2) == sharing(5)
    assert "\nlayers.{layer}.rotary: a buffer that no checkpoint holds" in sharing(2)
