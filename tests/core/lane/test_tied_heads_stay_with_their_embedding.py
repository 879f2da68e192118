"""A trainer that ties its head to its embedding, and engines that do and do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from local_engines import change, engines, held_equal, lane_to, weights_of

from weightlane.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REPORTS: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "name_cases.json").read_text())
}


def tied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensor under both names, as a module with a tied head gives it."""
    return weights | {HEAD: weights[EMBEDDING]}


def test_a_head_of_the_engine_s_own_gets_each_version_of_the_embedding(model_folder: Path) -> None:
    told, sequence = REPORTS["ti-02"], REPORTS["ti-03"]
    assert told["expected"]["send"] == [EMBEDDING, HEAD]
    weights = tied(weights_of(model_folder))
    (engine,) = engines(model_folder, 1)
    with lane_to(weights, [engine]) as lane:
        plan = lane.plan()
        assert plan.dropped == ()
        assert {EMBEDDING, HEAD} <= {tensor.name for tensor in plan.tensors}
        for version, update in enumerate(sequence["input"]["updates"], start=1):
            weights[EMBEDDING].fill_(update[EMBEDDING])
            lane.sync(version=version)
            live = engine.model.state_dict()
            assert live[EMBEDDING].unique().tolist() == live[HEAD].unique().tolist() == [version]
    final = {name: int(live[name].flatten()[0]) for name in (EMBEDDING, HEAD)}
    assert final == sequence["expected"]["final"]


def test_a_head_that_the_engine_ties_is_dropped_only_where_the_trainer_ties_it_too(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    with torch.random.fork_rng():
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    weights = weights_of(tmp_path)
    (engine,) = engines(tmp_path, 1)
    with lane_to(tied(weights), [engine]) as lane:
        assert [entry.canonical for entry in lane.plan().dropped] == [HEAD]
        change(weights, 1)
        lane.sync(version=1)
        assert held_equal(engine, tied(weights))
    # ti-04: flagged as tied in the receiver's configuration, but a tensor of other values is exported.
    assert REPORTS["ti-04"]["input"]["equal"] is False
    apart = weights | {HEAD: weights[EMBEDDING] + 1}
    with pytest.raises(PlanError) as caught:
        lane_to(apart, [engine])
    assert [(problem.kind, problem.subject) for problem in caught.value.problems] == [("tied", HEAD)]
