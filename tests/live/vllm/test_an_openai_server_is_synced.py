"""vLLM's own OpenAI server with a front beside it answers over HTTP what the trainer's model says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_ways import NEWEST, OLDER, Way
from openai_server import TOKENS, OpenAi, start_openai

import weightlane as wl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPTS = ((1, 2, 3, 4, 5), tuple(range(3, 203)))
"""One is longer than a block of the prefix cache, which is 128 tokens on a CPU."""
SYNCS = (1, 2, 3)
AGREES = 1e-4
MOVED = 1e-2


@pytest.fixture(scope="module", params=[NEWEST, pytest.param(OLDER, marks=pytest.mark.long_run)])
def server(
    request: pytest.FixtureRequest,
    vllm_python: Path,
    tokenized_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAi]:
    older = str(request.getfixturevalue("vllm_older")) if request.param == OLDER else ""
    log = tmp_path_factory.mktemp("logs") / f"vllm-serve-{request.param}.log"
    with start_openai(vllm_python, tokenized_folder, log, older=older) as openai:
        yield openai


def way(mode: str) -> pytest.MarkDecorator:
    return pytest.mark.way(Way("OpenAI server", "tiny", 1, mode, "torch"))


@way("full")
def test_full_weights_are_what_completions_are_made_of(
    server: OpenAi, tokenized_folder: Path, trainer_of: type
) -> None:
    trainer = trainer_of(tokenized_folder)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model), rollout=[wl.rollout("vllm", url=server.front)]
    ) as lane:
        for version in SYNCS:
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            assert truth.distance(server.complete(PROMPTS)) >= MOVED, "stale would pass"
            lane.sync(version=version)
            assert truth.distance(server.complete(PROMPTS)) <= AGREES


@way("merged")
def test_merged_weights_are_what_completions_are_made_of(
    server: OpenAi, tokenized_folder: Path, adapter_trainer_of: type
) -> None:
    trainer = adapter_trainer_of(tokenized_folder)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model, adapter="default"),
        rollout=[wl.rollout("vllm", url=server.front)],
        mode="merged",
    ) as lane:
        for version in SYNCS:
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            assert truth.distance(server.complete(PROMPTS)) >= MOVED, "stale would pass"
            lane.sync(version=version)
            assert truth.distance(server.complete(PROMPTS)) <= AGREES
    assert server.models() == {server.model}


@way("two_slot")
def test_an_adapter_is_a_model_of_the_server_under_the_name_that_the_lane_tells(
    server: OpenAi, tokenized_folder: Path, adapter_trainer_of: type
) -> None:
    trainer = adapter_trainer_of(tokenized_folder)
    before = server.complete(PROMPTS)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model, adapter="default"),
        rollout=[wl.rollout("vllm", url=server.front)],
        mode="adapter",
    ) as lane:
        names: list[str] = []
        for version in SYNCS:
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            lane.sync(version=version)
            names.append(lane.adapter_ref().name)
            assert truth.distance(server.complete(PROMPTS, names[-1])) <= AGREES
            assert names[-1] in server.models()
        base = server.complete(PROMPTS)
        assert truth.distance(base) >= MOVED
        assert base != before, "the base came with the first adapter"
        status, answer = server.ask("POST", "/v1/completions", {"model": names[0], "prompt": [1]})
        assert status == 404, answer
    assert server.models() == {server.model, names[-1]}, "what was published outlives its lane"


@way("paused")
def test_an_adapter_in_the_place_of_another_keeps_its_name(
    server: OpenAi, tokenized_folder: Path, adapter_trainer_of: type
) -> None:
    trainer = adapter_trainer_of(tokenized_folder)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model, adapter="default"),
        rollout=[wl.rollout("vllm", url=server.front)],
        mode="adapter",
        swap="paused",
    ) as lane:
        for version in SYNCS:
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            if version > SYNCS[0]:
                assert truth.distance(server.complete(PROMPTS, "default")) >= MOVED, "stale would pass"
            lane.sync(version=version)
            assert lane.adapter_ref().name == "default"
            assert truth.distance(server.complete(PROMPTS, "default")) <= AGREES
