from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightlane.facts import no_facts
from weightlane.probes import NotViable
from weightlane.receiver import LiveTensor
from weightlane_vllm.load_path import choose_path
from weightlane_vllm.refusals import EngineFeatures, no_load_path, refusals_of
from weightlane_vllm.worker import VllmWorkerEngine


def test_a_plain_dense_engine_is_not_refused() -> None:
    assert refusals_of(EngineFeatures()) == ()
    assert refusals_of(EngineFeatures(lora=True)) == ()


@pytest.mark.requirement("R54", part="what is dropped is not sent")
@pytest.mark.parametrize(
    ("features", "subject", "reason"),
    [
        (EngineFeatures(quantization="fp8"), "quantization", "fp8"),
        (EngineFeatures(experts=8), "mixture-of-experts", "8 routed experts"),
        (EngineFeatures(experts=8, lora=True), "mixture-of-experts", "success for experts under their"),
        (EngineFeatures(pipeline_parallel=2), "pipeline-parallel", "2 pipeline stages"),
        (EngineFeatures(data_parallel=2), "data-parallel", "2 data-parallel"),
        (EngineFeatures(latent_attention=True), "latent-attention", "kv_b_proj"),
        (EngineFeatures(drafter="the mtp drafter is fp8"), "speculative-decoding", "the mtp drafter"),
        (EngineFeatures(kv_connector="LMCacheConnectorV1"), "kv_transfer_config", "LMCacheConnectorV1"),
        (EngineFeatures(prefetched_layers=8), "offload_group_size", "in groups of 8"),
    ],
)
def test_each_feature_is_refused_by_name(features: EngineFeatures, subject: str, reason: str) -> None:
    (problem,) = refusals_of(features)
    assert (problem.kind, problem.subject) == ("capability", subject)
    assert reason in problem.what
    assert problem.fix


def test_all_refusals_come_at_once() -> None:
    problems = refusals_of(EngineFeatures(quantization="awq", experts=4, pipeline_parallel=2))
    assert [problem.subject for problem in problems] == [
        "quantization",
        "mixture-of-experts",
        "pipeline-parallel",
    ]


def features_of(**changes: Any) -> EngineFeatures:
    """What a worker reads from a stand-in for vLLM's configuration."""
    model = SimpleNamespace(quantization=None, get_num_experts=lambda: 0, use_mla=False)
    known: dict[str, Any] = {
        "model_config": model,
        "lora_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    worker = SimpleNamespace(vllm_config=SimpleNamespace(**{**known, **changes}))
    return VllmWorkerEngine(worker)._features()


def test_a_worker_reads_the_connector_from_its_configuration() -> None:
    assert features_of() == EngineFeatures()
    named = features_of(kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"))
    assert named == EngineFeatures(kv_connector="OffloadingConnector")
    unnamed = features_of(kv_transfer_config=SimpleNamespace(kv_connector=None))
    assert refusals_of(unnamed), "it was asked for, whatever it is"


@pytest.mark.parametrize(
    ("backend", "group", "prefetched"), [("auto", 8, 8), ("prefetch", 8, 8), ("uva", 8, 0), ("auto", 0, 0)]
)
def test_a_worker_reads_from_its_configuration_whether_layers_are_fetched_ahead(
    backend: str, group: int, prefetched: int
) -> None:
    prefetch = SimpleNamespace(offload_group_size=group)
    read = features_of(offload_config=SimpleNamespace(offload_backend=backend, prefetch=prefetch))
    assert read == EngineFeatures(prefetched_layers=prefetched)


def test_packed_away_parameters_that_cannot_be_loaded_again_are_named() -> None:
    live = (LiveTensor("a.weight", (4, 4), "float32"), LiveTensor("b.weight", (0,), "float32"))
    path = choose_path(no_facts("vllm"), live, ())
    assert isinstance(path, NotViable)
    problem = no_load_path(path, live)
    assert problem.subject == "b.weight"
    assert "packed 1 parameters away" in problem.what
    assert "nobody looked for" in problem.what
