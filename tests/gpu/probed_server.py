"""One SGLang server, asked for more than lanes do, by the words that `probed_engine.py` takes for vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from probed_scheduler import LOADER

from weightlane_sglang.contract import GENERATE_ROUTE
from weightlane_sglang.generation import generate_body, read_generations
from weightlane_sglang.http_channel import HttpChannel
from weightlane_sglang.loader_channel import carry
from weightlane_sglang.server_facts import read_facts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from weightlane.facts import EngineFacts
    from weightlane.program import EngineCall

_SECONDS = 300.0


class ProbedServer:
    """`call` takes `generate`, `score` and `hashes`, each with a JSON object; adapters are names."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = HttpChannel(address)
        self.facts: EngineFacts = read_facts(self.channel, timeout_seconds=_SECONDS)

    def call(self, call: EngineCall, /) -> str:
        word, _, rest = call.route.partition(" ")
        asked = json.loads(rest)
        if word == "generate":
            return json.dumps(self.generate(asked["prompts"], asked["tokens"], asked["adapter"]))
        if word == "score":
            return json.dumps(self.score(asked["text"], asked["adapter"]))
        if word == "hashes":
            return json.dumps(self._hashes(asked))
        raise ValueError(f"{self.address} is asked for {word}")

    def post(self, route: str, body: bytes) -> bytes:
        return self.send(route, (body,), len(body))

    def send(self, route: str, pieces: Iterable[bytes], length: int) -> bytes:
        return self.channel.send("POST", route, timeout_seconds=_SECONDS, body=pieces, length=length)

    def read_adapter(self, name: str, folder: Path) -> None:
        """Has SGLang itself load an adapter from a folder."""
        self.post("/load_lora_adapter", json.dumps({"lora_name": name, "lora_path": str(folder)}).encode())

    def generate(self, prompts: list[list[int]], tokens: int, adapter: str | None) -> list[dict[str, Any]]:
        body = generate_body(prompts, max_tokens=tokens, temperature=0.0, seed=0, adapter=adapter or "")
        made = read_generations(self.post(GENERATE_ROUTE, body), prompts=len(prompts), max_tokens=tokens)
        return [{"tokens": list(item.token_ids), "logprobs": list(item.logprobs)} for item in made]

    def score(self, text: list[int], adapter: str | None) -> list[dict[str, Any]]:
        """The log-probs of one text's tokens but the first; the batch is the same each time."""
        asked = {
            "input_ids": [text],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"lora_path": adapter} if adapter else {}),
        }
        (answer,) = json.loads(self.post(GENERATE_ROUTE, json.dumps(asked).encode()))
        rows = answer["meta_info"]["input_token_logprobs"][1:]
        tokens = [token for _, token, _ in rows]
        if tokens != text[1:]:
            raise ValueError(f"{self.address} scored {tokens}, and was asked for {text[1:]}")
        return [{"tokens": tokens, "logprobs": [float(logprob) for logprob, _, _ in rows]}]

    def _hashes(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        message = json.dumps(asked).encode()
        answers = carry(self.channel, self.facts, message, loader=LOADER, timeout_seconds=_SECONDS)
        told = [json.loads(answer) for answer in answers if answer is not None]
        failed = [item["error"] for item in told if "error" in item]
        if failed or len(told) < len(answers):
            raise RuntimeError(f"{len(told)} of {len(answers)} ranks of {self.address} answered: {failed}")
        return told
