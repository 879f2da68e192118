"""Does a live engine, after each of several syncs, say exactly what the trainer says?

A program for trainer ranks: `python -m weightlane.testing.parity --model DIR --engine vllm --url unix:/…`,
started once a rank with the environment of `torch.distributed`. Every rank loads the checkpoint, changes its
weights by seeded noise before each sync, and syncs; rank 0 asks engine and trainer for greedy continuations
of three prompts. It prints a step per sync (`weightlane.testing.steps`) and one JSON line (`SyncParity`), and
exits with 0 when all of them hold. With `--bucket-seconds` each bucket takes that long and is told as
`MOVED A BUCKET`, for whoever wants to break something in the middle of a sync.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist

import weightlane as wl
from weightlane.hookspecs import hookimpl
from weightlane.registry import get_registry
from weightlane.testing.greedy import Continuation, forced_logprobs, greedy_choices, greedy_continuations
from weightlane.testing.parity_result import SyncParity
from weightlane.testing.steps import take_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.events import SyncEvent
    from weightlane.messages import Generation

_GROUP_SECONDS = 300.0
TEXTS = ("The capital of France is", "Water boils at a temperature of", "The opposite of hot is")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line."""

    model: str
    engine: str
    url: str
    syncs: int
    tokens: int
    noise: float
    placement: Literal["replicated", "partitioned"]
    transport: Literal["shm", "inline", "disk"] | None
    bucket_bytes: int
    bucket_seconds: float
    engine_model: str


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


def change_weights(model: torch.nn.Module, *, noise: float, seed: int) -> None:
    """Adds seeded noise, `noise` times each matrix's own spread, equally on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            sample = torch.randn(parameter.shape, generator=generator)
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            # A norm of ones or a bias of zeros has no spread, and must change too or its loss goes unseen.
            parameter.add_(sample * (spread or 1.0) * noise)


def held_by_this_rank(model: torch.nn.Module, placement: str) -> Any:
    """The whole module, or for `partitioned` every n-th tensor, as a trainer with stages would hold."""
    if placement == "replicated" or not dist.is_initialized():
        return model
    rank, world_size = dist.get_rank(), dist.get_world_size()
    named = model.state_dict(keep_vars=True)
    return {
        name: tensor for number, (name, tensor) in enumerate(named.items()) if number % world_size == rank
    }


def run(arguments: Arguments) -> bool:
    """All syncs on this rank; True when every one holds (always, on ranks other than 0)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.train(mode=False)
    prompts, decode = _prompts(arguments.model, model.config.vocab_size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = rank == 0
    if arguments.bucket_seconds:
        get_registry().register(SlowBuckets(arguments.bucket_seconds), name="slow-buckets")
    rollout = wl.rollout(arguments.engine, url=arguments.url, model=arguments.engine_model) if first else None
    lane = wl.connect(
        trainer=wl.trainer(
            "torch", model=held_by_this_rank(model, arguments.placement), placement=arguments.placement
        ),
        rollout=[rollout] if rollout else None,
        mode="full",
        transport=arguments.transport,
        bucket_bytes=arguments.bucket_bytes,
    )
    held = True
    with lane:
        if first:
            sys.stdout.write(f"{lane.plan()}\n")
        before = greedy_continuations(model, prompts, arguments.tokens) if first else []
        for sync in range(1, arguments.syncs + 1):
            change_weights(model, noise=arguments.noise, seed=sync)
            report = take_step(f"sync {sync}", rank, lambda version=sync: lane.sync(version))  # type: ignore[misc]
            if report is None:
                return False
            if first:
                after = forced_logprobs(model, prompts, before)
                moved = max(_largest_difference(a.logprobs, b) for a, b in zip(before, after, strict=True))
                given = lane.replicas[0].generate(prompts, max_tokens=arguments.tokens)
                before = greedy_choices(model, prompts, [generation.token_ids for generation in given])
                parity = _compare(given, before, arguments.tokens, sync, moved, report.nbytes)
                parity = msgspec.structs.replace(
                    parity,
                    seconds=report.seconds,
                    verified=tuple(replica.verified for replica in report.replicas),
                    text=decode(before[0].token_ids),
                )
                sys.stdout.write(f"{msgspec.json.encode(parity).decode()}\n")
                held = held and parity.holds
    return held


def _compare(
    given: Sequence[Generation],
    wanted: Sequence[Continuation],
    tokens: int,
    sync: int,
    moved: float,
    nbytes: int,
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
        nbytes=nbytes,
        seconds=0.0,
        verified=(),
    )


def _largest_difference(some: Sequence[float], others: Sequence[float] | torch.Tensor) -> float:
    return float((torch.tensor(some) - torch.as_tensor(others)).abs().max())


def _prompts(folder: str, vocabulary: int) -> tuple[list[list[int]], Any]:
    if (Path(folder) / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer(text)["input_ids"] for text in TEXTS], tokenizer.decode
    generator = torch.Generator().manual_seed(7)
    lengths = (5, 9, 12)
    prompts = [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return prompts, lambda ids: " ".join(str(token) for token in ids)


def main() -> int:
    """Parses the command line, joins the other ranks, runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--placement", default="replicated", choices=("replicated", "partitioned"))
    parser.add_argument("--transport", default=None, choices=("shm", "inline", "disk"))
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--bucket-seconds", type=float, default=0.0)
    parser.add_argument("--engine-model", default="")
    arguments = Arguments(**vars(parser.parse_args()))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_SECONDS))
    try:
        return 0 if run(arguments) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
