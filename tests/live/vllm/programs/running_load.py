"""Requests that run in an `AsyncLLM` while its weights change, and which version made their tokens."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from weightlane_vllm.loop_thread import LoopThread

AGREES = 1e-4
_numbers = itertools.count()


@dataclass
class Record:
    """One request as its caller saw it; `named` is the version that its adapter tells, 0 for none."""

    prompt: tuple[int, ...]
    named: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: str = ""
    labels: tuple[tuple[int, str], ...] = ()
    cached: int = 0
    error: str = ""


@dataclass
class Load:
    """Callers that ask again and again, on the engine's own loop."""

    engine: Any
    loop: LoopThread
    records: list[Record] = field(default_factory=list)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    stopped: bool = False

    def begin(self, prompts: Sequence[Sequence[int]], tokens: int, ref: Callable[[], Any]) -> None:
        """One caller a prompt; `ref` tells what to name each time, None for the base."""
        self.stopped = False

        async def start() -> None:
            for number, prompt in enumerate(prompts):
                # Of different lengths, so that at any time some are in the middle.
                self._spawn(self._ask_again(tuple(prompt), tokens + 7 * number, ref))

        self.loop.run(start(), 10.0)

    def end(self) -> list[Record]:
        """Has the callers end after the request that each is at; gives what was recorded since."""
        self.stopped = True

        async def join() -> None:
            await asyncio.gather(*self.running)

        self.loop.run(join(), 120.0)
        seen, self.records = self.records, []
        return seen

    def ask(self, prompt: Sequence[int], tokens: int, ref: Any) -> Record:
        """One request, awaited."""
        return self.loop.run(self.one(tuple(prompt), tokens, ref), 120.0)

    def start(self, prompt: Sequence[int], tokens: int, ref: Any) -> None:
        """One request, which runs on; `end` awaits it."""

        async def begin() -> None:
            self._spawn(self._kept(self.one(tuple(prompt), tokens, ref)))
            await asyncio.sleep(0.3)

        self.loop.run(begin(), 10.0)

    async def one(self, prompt: tuple[int, ...], tokens: int, ref: Any) -> Record:
        from vllm import SamplingParams

        from weightlane_vllm.lora_request import lora_request

        record = Record(prompt, ref.version if ref else 0)
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        named = lora_request(ref) if ref else None
        given = {"prompt_token_ids": list(prompt)}
        try:
            async for output in self.engine.generate(
                given, parameters, f"load-{next(_numbers)}", lora_request=named
            ):
                made = output.outputs[0]
                record.cached = output.num_cached_tokens or 0
        except Exception as error:  # noqa: BLE001 - told to the test
            record.error = f"{type(error).__name__}: {error}"
            return record
        record.tokens = tuple(made.token_ids)
        rows = list(made.logprobs or ())[: len(record.tokens)]
        record.logprobs = tuple(row[token].logprob for token, row in zip(record.tokens, rows, strict=True))
        record.reason = str(made.finish_reason)
        spans = getattr(made, "weight_versions", None) or ()
        record.labels = tuple((span.start, span.version) for span in spans)
        return record

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _kept(self, asked: Coroutine[Any, Any, Record]) -> None:
        self.records.append(await asked)

    async def _ask_again(self, prompt: tuple[int, ...], tokens: int, ref: Callable[[], Any]) -> None:
        while not self.stopped:
            await self._kept(self.one(prompt, tokens, ref()))
            await asyncio.sleep(0.02 if self.records[-1].error else 0)


class Versions:
    """What a model says at each version that it had; tokens are forced: one pass tells of a request."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._states: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """The model as it is now."""
        self._states[version] = {
            name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()
        }

    @torch.no_grad()
    def makers(self, record: Record, start: int = 0, end: int | None = None) -> list[int]:
        """The versions that, greedily, say each token from `start` on, within 1e-4 of its log-prob."""
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        found = []
        for version, state in self._states.items():
            self.model.load_state_dict(state)
            ids = torch.tensor([[*record.prompt, *record.tokens]])
            rows = torch.log_softmax(self.model(ids).logits[0, len(record.prompt) - 1 : -1].float(), -1)
            said, tokens = rows[start:end], torch.tensor(record.tokens)[start:end]
            chosen = said.gather(1, tokens[:, None])[:, 0]
            off = (chosen - torch.tensor(record.logprobs)[start:end]).abs().max()
            if bool((said.argmax(-1) == tokens).all()) and float(off) <= AGREES:
                found.append(version)
        self.model.load_state_dict(now)
        return found
