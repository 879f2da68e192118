"""Does a live engine, after each of several syncs, say exactly what the trainer says?

A program for trainer ranks: `python -m weightlane.testing.parity --model DIR --engine vllm --url unix:/…`,
started once a rank with the environment of `torch.distributed`. Every rank loads the checkpoint, changes its
weights by seeded noise or by an optimizer's step before each sync, and syncs; rank 0 asks engine and trainer
for greedy continuations of three prompts. `--url in-process` takes a reference engine of rank 0's own, whose
base is then looked at too; a program that has another engine in its process hands it to `run`. With
`--prompt-tokens` prompts are long, so that an engine's prefix cache keeps them from sync to sync. It prints a
step per sync (`weightlane.testing.steps`) and one JSON line (`SyncParity`), and exits with 0 when all of them
hold. With `--bucket-seconds` each bucket takes that long and is told as
`MOVED A BUCKET`, for whoever wants to break something in the middle of a sync.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist

import weightlane as wl
from weightlane.hookspecs import hookimpl
from weightlane.reference.engine import ReferenceEngine
from weightlane.registry import get_registry
from weightlane.testing.greedy import Continuation, forced_logprobs, greedy_choices
from weightlane.testing.parity_result import SyncParity
from weightlane.testing.parity_trainer import Training, make_trainer
from weightlane.testing.steps import take_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightlane.events import SyncEvent
    from weightlane.lane import Lane
    from weightlane.lane_messages import SyncReport
    from weightlane.messages import Generation
    from weightlane.specs import RolloutSpec
    from weightlane.testing.parity_trainer import ParityTrainer

_GROUP_SECONDS = 300.0
IN_PROCESS = "in-process"
TEXTS = ("The capital of France is", "Water boils at a temperature of", "The opposite of hot is")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line."""

    model: str
    engine: str
    url: str
    syncs: int
    tokens: int
    prompt_tokens: int
    noise: float
    placement: Literal["replicated", "partitioned"]
    transport: Literal["shm", "inline", "collective", "disk"] | None
    bucket_bytes: int
    bucket_seconds: float
    engine_model: str
    trainer: str
    mode: Literal["full", "merged", "adapter"]
    swap: Literal["two_slot", "paused"] | None
    training: Training
    learning_rate: float


class SlowBuckets:
    """An observer that makes a sync last, and says when it is under way."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @hookimpl
    def weightlane_sync_event(self, event: SyncEvent) -> None:
        """Sleeps after each bucket that this rank moved."""
        if event.kind == "bucket-moved":
            sys.stdout.write("MOVED A BUCKET\n")
            sys.stdout.flush()
            time.sleep(self._seconds)


def run(arguments: Arguments, handle: object | None = None) -> bool:
    """All syncs on this rank; True when every one holds (always, on ranks other than 0).

    Args:
        arguments: of the program.
        handle: on rank 0 an engine of this process, which its owner ends; its `url` is then `in-process`.
    """
    trainer = make_trainer(
        arguments.model,
        trainer=arguments.trainer,
        mode=arguments.mode,
        placement=arguments.placement,
        training=arguments.training,
        noise=arguments.noise,
        learning_rate=arguments.learning_rate,
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    if arguments.bucket_seconds:
        get_registry().register(SlowBuckets(arguments.bucket_seconds), name="slow-buckets")
    if handle is None and arguments.url == IN_PROCESS and rank == 0 and arguments.engine == "reference":
        handle = ReferenceEngine(arguments.model)
    lane = wl.connect(
        trainer=trainer.spec,
        rollout=[_rollout(arguments, handle)] if rank == 0 else None,
        mode=arguments.mode,
        transport=arguments.transport,
        bucket_bytes=arguments.bucket_bytes,
        swap=arguments.swap,
    )
    with lane:
        if rank == 0:
            sys.stdout.write(f"{lane.plan()}\n")
        visible = handle if isinstance(handle, ReferenceEngine) else None
        return _Syncs(arguments, trainer, lane, rank, visible).run()


def _rollout(arguments: Arguments, handle: object | None) -> RolloutSpec:
    if handle is not None:
        return wl.rollout(arguments.engine, engine=handle)
    return wl.rollout(arguments.engine, url=arguments.url, model=arguments.engine_model)


class _Syncs:
    """The syncs of one rank. Where the trainer's forward is a collective, every rank asks it the same."""

    def __init__(
        self,
        arguments: Arguments,
        trainer: ParityTrainer,
        lane: Lane,
        rank: int,
        engine: ReferenceEngine | None,
    ) -> None:
        self._arguments = arguments
        self._trainer = trainer
        self._lane = lane
        self._rank = rank
        self._engine = engine
        vocabulary = int(trainer.model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
        self._prompts, self._decode = _prompts(arguments.model, vocabulary, arguments.prompt_tokens)
        self._base: dict[str, torch.Tensor] = {}

    def run(self) -> bool:
        """True when every sync holds."""
        held, asks = True, self._rank == 0 or self._trainer.speaks_on_all
        words, before = self._first_words() if asks else ([], [])
        for sync in range(1, self._arguments.syncs + 1):
            self._trainer.change(seed=sync)
            report = take_step(f"sync {sync}", self._rank, lambda version=sync: self._lane.sync(version))  # type: ignore[misc]
            if report is None:
                return False
            if not asks:
                continue
            after = forced_logprobs(self._trainer.model, self._prompts, words)
            moved = max(_largest_difference(a, b) for a, b in zip(before, after, strict=True))
            given = self._given() if self._rank == 0 else ()
            words = greedy_choices(self._trainer.model, self._prompts, self._told(given))
            before = [torch.tensor(item.logprobs) for item in words]
            if self._rank == 0:
                parity = _compare(given, words, self._arguments.tokens, sync, moved, report)
                parity = msgspec.structs.replace(
                    parity, text=self._decode(words[0].token_ids), base_unchanged=self._base_unchanged()
                )
                sys.stdout.write(f"{msgspec.json.encode(parity).decode()}\n")
                held = held and parity.holds
        return held

    def _first_words(self) -> tuple[list[Continuation], list[torch.Tensor]]:
        model, tokens = self._trainer.model, self._arguments.tokens
        words = greedy_choices(model, self._prompts, [[1] * tokens] * len(self._prompts))
        return words, forced_logprobs(model, self._prompts, words)

    def _given(self) -> tuple[Generation, ...]:
        named = self._lane.adapter_ref() if self._arguments.mode == "adapter" else None
        return self._lane.replicas[0].generate(
            self._prompts, max_tokens=self._arguments.tokens, adapter=named
        )

    def _told(self, given: Sequence[Generation]) -> list[list[int]]:
        """The engine's words, on every rank where every rank is to ask the trainer about them."""
        shape = (len(self._prompts), self._arguments.tokens)
        words = torch.tensor([item.token_ids for item in given]) if given else torch.zeros(shape).long()
        if self._trainer.speaks_on_all and dist.is_initialized():
            dist.broadcast(words, src=0)  # bounded by the group's timeout
        told: list[list[int]] = words.tolist()
        return told

    def _base_unchanged(self) -> bool | None:
        """Whether the engine's base is bit by bit what it was after the first sync; None where nobody can."""
        if self._engine is None or self._arguments.mode != "adapter":
            return None
        now: dict[str, torch.Tensor] = self._engine.model.state_dict()
        if not self._base:
            self._base = {name: tensor.clone() for name, tensor in now.items()}
        return all(torch.equal(self._base[name], tensor) for name, tensor in now.items())


def _compare(
    given: Sequence[Generation],
    wanted: Sequence[Continuation],
    tokens: int,
    sync: int,
    moved: float,
    report: SyncReport,
) -> SyncParity:
    pairs = list(zip(given, wanted, strict=True))
    return SyncParity(
        sync=sync,
        tokens_equal=all(
            len(mine.token_ids) == tokens and mine.token_ids == theirs.token_ids for mine, theirs in pairs
        ),
        difference=max(_largest_difference(mine.logprobs, theirs.logprobs) for mine, theirs in pairs),
        moved=moved,
        versions=tuple(generation.weight_version for generation in given),
        nbytes=report.nbytes,
        seconds=report.seconds,
        verified=tuple(replica.verified for replica in report.replicas),
        phases=tuple(phase.phase.value for phase in report.phases),
    )


def _largest_difference(
    some: Sequence[float] | torch.Tensor, others: Sequence[float] | torch.Tensor
) -> float:
    return float((torch.as_tensor(some) - torch.as_tensor(others)).abs().max())


def _prompts(folder: str, vocabulary: int, least: int) -> tuple[list[list[int]], Any]:
    """Three prompts of at least `least` tokens, and what decodes tokens."""
    if (Path(folder) / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        told = [tokenizer(text)["input_ids"] for text in TEXTS]
        return [ids * max(1, -(-least // len(ids))) for ids in told], tokenizer.decode
    generator = torch.Generator().manual_seed(7)
    lengths = tuple(max(least, short) for short in (5, 9, 12))
    prompts = [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return prompts, lambda ids: " ".join(str(token) for token in ids)


def parse(words: Sequence[str] | None = None) -> Arguments:
    """The options of the program; of this process where there are no `words`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=0, help="at least so many tokens a prompt")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--placement", default="replicated", choices=("replicated", "partitioned"))
    parser.add_argument("--transport", default=None, choices=("shm", "inline", "collective", "disk"))
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--bucket-seconds", type=float, default=0.0)
    parser.add_argument("--engine-model", default="")
    parser.add_argument("--trainer", default="torch", choices=("torch", "fsdp"))
    parser.add_argument("--mode", default="full", choices=("full", "merged", "adapter"))
    parser.add_argument("--swap", default=None, choices=("two_slot", "paused"))
    parser.add_argument("--training", default="noise", choices=("noise", "optimizer"))
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return Arguments(**vars(parser.parse_args(words)))


@contextmanager
def joined_ranks() -> Iterator[None]:
    """The process group of all ranks, where there are several, until the block ends; another's stays."""
    found = dist.is_initialized()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_SECONDS))
    try:
        yield
    finally:
        if dist.is_initialized() and not found:
            dist.destroy_process_group()


def main() -> int:
    """Parses the command line, joins the other ranks, runs."""
    arguments = parse()
    with joined_ranks():
        return 0 if run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
