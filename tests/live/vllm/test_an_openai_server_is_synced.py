"""vLLM's own OpenAI server with a front beside it answers over HTTP what the trainer's model says."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.front.process import start_front_process
from weightlane.messages import Generation
from weightlane.waiting import wait_until
from weightlane_vllm.launch import FrontStart, LoraStart, serve_command, serve_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99))
TOKENS = 12
AGREES = 1e-4
MOVED = 1e-2
_ENTRY = "from importlib.metadata import entry_points; print(entry_points(group='vllm.general_plugins'))"


class OpenAi:
    """A server's HTTP routes, and the address of its front."""

    def __init__(self, port: int, model: str, front: str) -> None:
        self.front, self.model = front, model
        self._port = port

    def ask(self, method: str, path: str, body: object = None, seconds: float = 120.0) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=seconds)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")

    def healthy(self) -> bool:
        try:
            return self.ask("GET", "/health", seconds=5.0)[0] == 200
        except OSError:
            return False

    def models(self) -> set[str]:
        return {item["id"] for item in self.ask("GET", "/v1/models")[1]["data"]}

    def complete(self, prompts: Sequence[Sequence[int]], model: str = "") -> list[Generation]:
        body = {
            "model": model or self.model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        choices: list[Any] = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [
            Generation(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), None)
            for choice in choices
        ]


@pytest.fixture(scope="module")
def tokenized_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, which an OpenAI server insists on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_folder, folder)
    words = models.WordLevel({f"t{number}": number for number in range(512)}, unk_token="t0")  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["0.32", pytest.param("0.27.1", marks=pytest.mark.long_run)])
def server(
    request: pytest.FixtureRequest,
    vllm_python: Path,
    tokenized_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAi]:
    older = str(request.getfixturevalue("vllm_older")) if request.param == "0.27.1" else ""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (older, os.environ.get("PYTHONPATH", ""))))}
    found = subprocess.run([vllm_python, "-c", _ENTRY], capture_output=True, text=True, check=True).stdout
    assert "weightlane" in found, "install weightlane-vllm anew: its entry point for vLLM is not there"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="wl-") as private:
        start = FrontStart(
            model=str(tokenized_folder),
            address=f"unix:{private}/front",
            device="cpu",
            lora=LoraStart(slots=2, rank=8),
        )
        arguments = ("--host", "127.0.0.1", "--port", str(port), "--enforce-eager")
        with start_front_process(
            (*serve_command(start, python=str(vllm_python)), *arguments),
            start.address,
            log=tmp_path_factory.mktemp("logs") / f"vllm-serve-{request.param}.log",
            ready_timeout_seconds=600.0,
            environment={**paths, **serve_environment(start)},
        ) as process:
            openai = OpenAi(port, str(tokenized_folder), start.address)
            assert wait_until(openai.healthy, seconds=120.0, longest_sleep=0.5), process.last_log_lines()
            yield openai


def test_full_weights_are_what_completions_are_made_of(
    server: OpenAi, tokenized_folder: Path, trainer_of: type
) -> None:
    trainer = trainer_of(tokenized_folder)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model), rollout=[wl.rollout("vllm", url=server.front)]
    ) as lane:
        for version in (1, 2):
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            assert truth.distance(server.complete(PROMPTS)) >= MOVED, "stale would pass"
            lane.sync(version=version)
            assert truth.distance(server.complete(PROMPTS)) <= AGREES


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
        for version in (1, 2):
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
