"""Facts, descriptions and refusals of a live vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import weightlane as wl
from weightlane.errors import EngineError, PlanError
from weightlane.front.client import FrontEndpoint
from weightlane.probes import Viable
from weightlane.program import EngineCall
from weightlane_vllm.eras import probe_lora_load_weights
from weightlane_vllm.facts import LORA_LOAD_WEIGHTS, PLAIN_CPU_WEIGHTS, SLEEP_AVAILABLE, SLEEP_RECORDS
from weightlane_vllm.names import resolve
from weightlane_vllm.namespace import Namespace

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

BACKEND = "weightlane-vllm/vllm@lora-load-weights"  # two eras share the plain name


def test_facts_come_from_the_worker_and_pass_the_probe(tiny_front: FrontProcess) -> None:
    facts = FrontEndpoint(tiny_front.address, 60.0).facts()
    assert (facts.source, facts.device) == ("worker", "cpu")
    assert facts.attributes[LORA_LOAD_WEIGHTS]
    assert facts.attributes[PLAIN_CPU_WEIGHTS], "the patch is visible in the facts"
    assert isinstance(probe_lora_load_weights(facts), Viable)


@pytest.mark.requirement("R42")
def test_every_expected_tensor_reaches_a_live_shard(tiny_front: FrontProcess) -> None:
    workers = FrontEndpoint(tiny_front.address, 60.0).describe_workers(BACKEND)
    assert [worker.worker for worker in workers] == list(range(len(workers)))
    assert len({worker.process_id for worker in workers}) == len(workers)
    for worker in workers:
        live = {tensor.name: tensor for tensor in worker.live}
        packed = live["model.layers.0.self_attn.qkv_proj.base_layer.weight"]
        assert packed.shape == (256 // len(workers), 64)  # (4 + 2 + 2 heads of 32) over the workers
        assert worker.expected
        for tensor in worker.expected:
            assert tensor.dtype == "float32", tensor.name
            assert resolve(tensor.name, Namespace.of(worker)).target


def test_incarnation_stays_while_the_engine_lives(tiny_front: FrontProcess) -> None:
    endpoint = FrontEndpoint(tiny_front.address, 60.0)
    asked = [endpoint.describe_workers(BACKEND) for _ in range(2)]
    told = [[worker.incarnation for worker in workers] for workers in asked]
    assert told[0] == told[1]
    assert len(set(told[0])) == len(told[0])


def test_bad_tensors_are_refused_together_and_nothing_is_touched(
    tiny_front: FrontProcess, tiny_folder: Path, trainer_of: type
) -> None:
    endpoint = FrontEndpoint(tiny_front.address, 60.0)
    before = endpoint.generate([(1, 2, 3)], max_tokens=4)
    tensors = {name: tensor.clone() for name, tensor in trainer_of(tiny_folder).model.state_dict().items()}
    tensors["model.norm.weigth"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(512, 65)
    with pytest.raises(PlanError) as caught:
        wl.connect(
            trainer=wl.trainer("torch", model=tensors), rollout=[wl.rollout("vllm", url=tiny_front.address)]
        )
    found = {(problem.kind, problem.subject) for problem in caught.value.problems}
    assert {
        ("extra-name", "model.norm.weigth"),
        ("missing-name", "model.norm.weight"),
        ("shape", "lm_head.weight"),
    } <= found
    assert endpoint.generate([(1, 2, 3)], max_tokens=4) == before


def test_an_unknown_call_is_an_error(tiny_front: FrontProcess) -> None:
    with pytest.raises(EngineError, match="no call 'sleep'"):
        FrontEndpoint(tiny_front.address, 60.0).call(EngineCall("sleep"))


@pytest.mark.parametrize("release", [("kv_cache",), ("weights", "kv_cache")])
def test_a_cpu_build_which_only_pretends_to_sleep_is_refused_by_name(
    tiny_front: FrontProcess, tiny_folder: Path, trainer_of: type, release: tuple[str, ...]
) -> None:
    facts = FrontEndpoint(tiny_front.address, 60.0).facts()
    assert facts.attributes[SLEEP_RECORDS], "it has the records, and nothing that would write to them"
    assert facts.attributes[SLEEP_AVAILABLE] is False
    with pytest.raises(PlanError) as caught:
        wl.connect(
            trainer=wl.trainer("torch", model=trainer_of(tiny_folder).model),
            rollout=[wl.rollout("vllm", url=tiny_front.address)],
            release=release,
        )
    assert [(problem.kind, problem.subject) for problem in caught.value.problems] == [
        ("release", tag) for tag in release
    ]
    assert "frees nothing and only logs a warning" in str(caught.value)
