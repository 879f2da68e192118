"""Where the program stands: its engines, its ranks, the GPU's memory, and the figures so far."""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from proof_words import Words

from weightlane.program import EngineCall

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from proof_words import Engine, Side
    from run_spread import Said

HERE = Path(__file__).parent
START_SECONDS = 400.0


class Ground(ABC):
    """The engines, the ranks of the trainer, and what has been seen so far. `title` is the engine's name."""

    title: str

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.figures: dict[str, Any] = {"checks": {}, "seconds": {}, "torch": torch.__version__}
        self.started = time.monotonic()
        self.ends = contextlib.ExitStack()
        self.words = Words(options.kernels, self.title)

    def keep(self) -> None:
        """Figures so far: a run that is cut short has told something."""
        (Path(self.options.out) / "figures.json").write_text(json.dumps(self.figures, indent=1))

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def check(self, name: str, passed: bool, told: Any) -> None:
        self.figures["checks"][name] = {"passed": bool(passed), "told": told}
        self.keep()
        self.say(f"{'pass' if passed else 'FAIL'}  {name}: {json.dumps(told)[:300]}")

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.figures["seconds"][name] = round(time.monotonic() - started, 3)
        self.say(f"{name}: {self.figures['seconds'][name]} s")

    @abstractmethod
    def engine(self, name: str, model: Path, *more: str) -> Engine:
        """One that runs on this checkpoint and is kept until the end; `more` are arguments for its start."""

    def hashes(self, engine: Engine, adapter: Any = None) -> list[dict[str, Any]]:
        route = f"hashes {json.dumps({'adapter': adapter})}"
        told: list[dict[str, Any]] = json.loads(engine.call(EngineCall(route, timeout_seconds=300.0)))
        return told

    def said(self, engine: Engine, adapter: Any = None) -> Said:
        return self.words.greedy((engine, adapter))

    def scored(self, *sides: Side) -> list[list[Said]]:
        return self.words.scored(*sides)

    def meet(self) -> None:
        """All ranks get here before any goes on: rank 0 alone talks to the engines, which takes long."""
        if self.options.tensor_parallel > 1:
            torch.distributed.barrier()

    def everywhere(self, value: int) -> list[int]:
        """The value of every rank."""
        if self.options.tensor_parallel == 1:
            return [value]
        values: list[int] = [0] * self.options.tensor_parallel
        torch.distributed.all_gather_object(values, value)
        return values

    def free_memory(self) -> int:
        if self.options.device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
