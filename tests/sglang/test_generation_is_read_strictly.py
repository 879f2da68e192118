"""Continuations as SGLang gives them, and what is no continuation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineError
from weightlane_sglang.endpoint import SglangEndpoint
from weightlane_sglang.generation import generate_body, read_generations


def output(**changes: Any) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-0.5, 3, None], [-0.25, 9, None]],
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "4",
        "e2e_latency": 0.1,
    }
    return {"text": "", "output_ids": [3, 9], "meta_info": {**meta, **changes}}


def test_tokens_logprobs_and_version(fake_server: Any, answer: Any) -> None:
    fake_server.answers["/generate"] = answer([output(), output(weight_version="default")])
    endpoint = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=5)
    first, second = endpoint.generate([[1, 2], (5,)], max_tokens=2)
    assert endpoint.generate([], max_tokens=2) == ()
    endpoint.close()
    assert first.token_ids == (3, 9)
    assert first.logprobs == (-0.5, -0.25)
    assert (first.weight_version, second.weight_version) == (4, None)
    (body,) = fake_server.bodies("/generate")
    assert body["input_ids"] == [[1, 2], [5]]
    assert body["sampling_params"]["temperature"] == 0.0
    assert "sampling_seed" not in body["sampling_params"]


def test_a_seed_is_sent_for_sampling_alone() -> None:
    body = json.loads(generate_body([[1]], max_tokens=2, temperature=1.0, seed=5))
    assert body["sampling_params"]["sampling_seed"] == 5


@pytest.mark.parametrize("temperature", [0.7, 1.3, -1.0])
def test_a_temperature_that_would_scale_the_logprobs_is_refused(
    fake_server: Any, answer: Any, temperature: float
) -> None:
    fake_server.answers["/generate"] = answer([output()])
    endpoint = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=5)
    assert endpoint.generate([[1]], max_tokens=2, temperature=1.0)
    with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        endpoint.generate([[1]], max_tokens=2, temperature=temperature)
    endpoint.close()
    assert len(fake_server.bodies("/generate")) == 1, "it was refused before it was sent"


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        (
            [output(finish_reason={"type": "abort", "message": "Aborted"})],
            "aborted the continuation of prompt 0",
        ),
        ([output(output_token_logprobs=[[None, 3, None]])], "no log-prob for token 3"),
        ([output(), output()], "2 continuations for 1 prompts"),
        (
            [output(output_token_logprobs=[[-0.5, 3, None]])],
            "by 1 tokens with 1 log-probs, not by 2",
        ),
        ([{"text": "x"}], "another shape"),
        ({"error": "x"}, "another shape"),
    ],
)
def test_anything_else_is_an_error(outputs: Any, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        read_generations(json.dumps(outputs).encode(), prompts=1, max_tokens=2)
