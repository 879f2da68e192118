from __future__ import annotations

from typing import Any

import pytest

from weightlane.errors import NotServableError, SyncError, SyncTimeoutError
from weightlane.messages import Generate, ReceivePlan, WireTensor
from weightlane.reference import engine as engine_module
from weightlane.reference.engine import ReferenceEngine

PROBE = Generate(((1, 2, 3),), 4)


@pytest.fixture
def engine(untied_folder: str) -> ReferenceEngine:
    return ReferenceEngine(untied_folder)


@pytest.fixture
def tied_engine(tied_folder: str) -> ReferenceEngine:
    return ReferenceEngine(tied_folder)


def sync(engine: ReferenceEngine, weights: dict[str, Any], version: int) -> None:
    engine.worker.begin(version)
    assert engine.worker.load_weights(list(weights.items())) == len(weights)
    engine.worker.finish(version)
    engine.worker.publish(version)


def test_a_sync_writes_every_tensor_in_place_and_moves_the_logprobs(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    import torch

    before = engine.generate(PROBE).generations[0]
    addresses = {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}
    sync(engine, other_untied, 7)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, other_untied[name]), name
        assert tensor.data_ptr() == addresses[name], name
    after = engine.generate(PROBE).generations[0]
    assert (before.weight_version, after.weight_version) == (None, 7)
    assert max(abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)) > 1e-2


def test_a_tied_tensor_follows_its_owner_and_is_refused_itself(
    tied_engine: ReferenceEngine, other_tied: dict[str, Any]
) -> None:
    import torch

    weights = {name: tensor for name, tensor in other_tied.items() if name != "lm_head.weight"}
    sync(tied_engine, weights, 1)
    assert torch.equal(tied_engine.model.lm_head.weight, other_tied["lm_head.weight"])
    tied_engine.worker.begin(2)
    with pytest.raises(SyncError, match=r"lm_head\.weight cannot be .*tied to model\.embed_tokens\.weight"):
        tied_engine.worker.load_weights([("lm_head.weight", other_tied["lm_head.weight"])])


def test_from_begin_to_publish_nothing_is_generated(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    worker = engine.worker
    assert worker.describe().servable
    worker.begin(3)
    for step in (
        lambda: worker.load_weights(list(other_untied.items())),
        lambda: worker.finish(3),
        lambda: worker.publish(3),
    ):
        assert not worker.describe().servable
        with pytest.raises(NotServableError, match="sync to version 3"):
            engine.generate(PROBE)
        step()
    description = worker.describe()
    assert (description.servable, description.held_version) == (True, 3)
    assert engine.generate(PROBE).generations[0].weight_version == 3


def test_a_sync_that_lacks_a_tensor_fails_and_the_next_whole_one_heals(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    partial = {name: tensor for name, tensor in other_untied.items() if name != "model.norm.weight"}
    engine.worker.begin(1)
    engine.worker.load_weights(list(partial.items()))
    with pytest.raises(SyncError, match=r"Version 1 is incomplete: model\.norm\.weight"):
        engine.worker.finish(1)
    with pytest.raises(NotServableError):
        engine.generate(PROBE)
    sync(engine, other_untied, 2)
    assert engine.generate(PROBE).generations[0].weight_version == 2


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("model.norm.weight", (1,), r"shape \[1\] and the model holds \[64\]"),
        ("model.norm.weigth", (64,), "no such name"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    engine: ReferenceEngine, name: str, shape: tuple[int, ...], why: str
) -> None:
    import torch

    engine.worker.begin(1)
    with pytest.raises(SyncError, match=f"{name} .*{why}"):
        engine.worker.load_weights([(name, torch.ones(shape))])


@pytest.mark.requirement("R66")
def test_a_tensor_that_comes_twice_is_refused(engine: ReferenceEngine) -> None:
    import torch

    engine.worker.begin(1)
    with pytest.raises(SyncError, match=r"model\.norm\.weight came twice"):
        engine.worker.load_weights([("model.norm.weight", torch.ones(64))] * 2)


def test_writes_reach_a_parameter_that_was_replaced_meanwhile(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    import torch

    engine.model.model.norm.weight = torch.nn.Parameter(torch.zeros(64))
    sync(engine, other_untied, 1)
    assert torch.equal(engine.model.model.norm.weight, other_untied["model.norm.weight"])


def test_check_plan_lists_every_problem_at_once(tied_engine: ReferenceEngine) -> None:
    tensors = (
        WireTensor("model.norm.weight", (64,), "float32"),
        WireTensor("model.norm.weigth", (64,), "float32"),
        WireTensor("model.embed_tokens.weight", (512, 65), "float32"),
        WireTensor("lm_head.weight", (512, 64), "float32"),
    )
    problems = tied_engine.worker.check_plan(
        ReceivePlan("lane", "digest", "reference", "inline", tensors, ())
    )
    assert [(problem.kind, problem.subject) for problem in problems] == [
        ("extra-name", "model.norm.weigth"),
        ("shape", "model.embed_tokens.weight"),
        ("extra-name", "lm_head.weight"),
    ]
    assert "model.norm.weight" in problems[0].near


def test_a_sync_does_not_wait_for_ever_for_a_generation(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_FENCE_WAIT_SECONDS", 0.1)
    with engine._busy, pytest.raises(SyncTimeoutError, match=r"Version 4 waited 0\.1 s"):
        engine.worker.begin(4)
    assert engine.servable


def test_incarnations_differ_between_engines_and_not_between_calls(
    engine: ReferenceEngine, untied_folder: str
) -> None:
    again = ReferenceEngine(untied_folder)
    assert engine.worker.describe().incarnation == engine.worker.describe().incarnation
    assert engine.worker.describe().incarnation != again.worker.describe().incarnation


def test_description_tells_buffers_ties_and_live_dtypes(tied_folder: str) -> None:
    description = ReferenceEngine(tied_folder, dtype="bfloat16").worker.describe()
    expected = {tensor.name: tensor for tensor in description.expected}
    assert expected["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert {tensor.dtype for tensor in description.expected} == {"bfloat16"}
    kinds = {tensor.name: tensor.kind for tensor in description.live}
    assert kinds["lm_head.weight"] == "parameter"
    assert "buffer" in kinds.values(), "the rotary table is there, live, and not part of the checkpoint"
    assert not [name for name, kind in kinds.items() if kind == "buffer" and name in expected]


def test_fused_experts_are_refused_by_name_and_others_served(tmp_path: Any) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weightlane.errors import EngineError

    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=1,
        vocab_size=512,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.random.fork_rng():
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    if not hasattr(model.model.layers[0].mlp.experts, "gate_up_proj"):  # transformers 4
        assert ReferenceEngine(str(tmp_path)).worker.describe().servable
        return
    with pytest.raises(
        EngineError, match=r"fused experts yet: model\.layers\.0\.mlp\.experts\.0\.\w+\.weight"
    ):
        ReferenceEngine(str(tmp_path))
