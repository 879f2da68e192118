"""vLLM's own OpenAI server as a child process, with weightlane's front beside it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from weightlane.front.process import start_front_process
from weightlane.messages import Generation
from weightlane.waiting import wait_until
from weightlane_vllm.launch import FrontStart, LoraStart, serve_command, serve_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TOKENS = 12
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
        """Greedy continuations of `TOKENS` tokens; `model` "" is the base."""
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


@contextmanager
def start_openai(
    python: Path, model: Path, log: Path, *, tensor_parallel: int = 1, older: str = ""
) -> Iterator[OpenAi]:
    """The server on a model with a tokenizer, until the block ends. `older` is the folder of another vLLM."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (older, os.environ.get("PYTHONPATH", ""))))}
    found = subprocess.run([python, "-c", _ENTRY], capture_output=True, text=True, check=True).stdout
    assert "weightlane" in found, "install weightlane-vllm anew: its entry point for vLLM is not there"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="wl-") as private:
        start = FrontStart(
            model=str(model),
            address=f"unix:{private}/front",
            device="cpu",
            tensor_parallel=tensor_parallel,
            lora=LoraStart(slots=4, rank=16),
        )
        arguments = ("--host", "127.0.0.1", "--port", str(port), "--enforce-eager")
        with start_front_process(
            (*serve_command(start, python=str(python)), *arguments),
            start.address,
            log=log,
            ready_timeout_seconds=600.0,
            environment={**paths, **serve_environment(start)},
        ) as process:
            openai = OpenAi(port, str(model), start.address)
            assert wait_until(openai.healthy, seconds=120.0, longest_sleep=0.5), process.last_log_lines()
            yield openai
