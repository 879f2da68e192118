"""A configuration may call a head tied that the engine holds as a tensor of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from name_cases import worker

from weightlane.receiver import ExpectedTensor
from weightlane_vllm.namespace import Namespace
from weightlane_vllm.ties import live_owner

REPORT = next(
    case
    for case in json.loads((Path(__file__).parents[2] / "core" / "data" / "name_cases.json").read_text())
    if case["id"] == "ti-04"
)
EMBEDDING, HEAD = REPORT["expected"]["send"]
INNER = "language_model.model.embed_tokens"
MAPPER = {"prefix": {"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model."}}


def owner(live: list[str], tied_to: str = EMBEDDING) -> str:
    space = Namespace.of(worker(live, MAPPER, wrapper_loads=True))
    return live_owner(ExpectedTensor(HEAD, (4, 2), tied_to=tied_to), space)


@pytest.mark.parametrize("wrapper", ["", ".base_layer"])
def test_a_head_that_is_live_beside_its_embedding_is_not_tied_whatever_a_flag_says(wrapper: str) -> None:
    assert REPORT["input"]["config"]["tie_word_embeddings"] is True
    assert owner([f"{INNER}{wrapper}.weight", "language_model.lm_head.weight"]) == ""


@pytest.mark.parametrize("wrapper", ["", ".base_layer"])
def test_a_head_that_is_not_live_by_itself_is_read_through_its_embedding(wrapper: str) -> None:
    assert owner([f"{INNER}{wrapper}.weight"]) == EMBEDDING


def test_a_head_that_no_flag_ties_stays_untied() -> None:
    assert owner([f"{INNER}.weight"], tied_to="") == ""
