"""A tiny model, reference engines in processes of their own, and ranks that run `rank_program.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.errors import WeightlaneError
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import last_lines
from weightlane.interrupts import interrupts_held
from weightlane.testing.ranks import RankGroup, RankOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

sys.path.insert(0, str(Path(__file__).parent))  # under importlib mode test folders are not on the path

PROGRAM = Path(__file__).with_name("rank_program.py")
NURSERY = Path(__file__).with_name("engine_nursery.py")
READY_SECONDS = 110.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("lane-model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class EngineProcess:
    """A reference engine in a process of its own."""

    address: str
    process_id: int
    log: Path

    def kill(self) -> None:
        """SIGKILL; returns when its socket answers nobody any more."""
        os.kill(self.process_id, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self.process_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


class Nursery:
    """Starts engines, at a new address or at one that an engine died on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        with interrupts_held():
            self._process = subprocess.Popen(
                [sys.executable, str(NURSERY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )

    def start(self, model: Path, address: str = "") -> EngineProcess:
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        address = address or f"unix:{self._folder}/front-{self._count}.sock"
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(
            json.dumps({"model": str(model), "address": address, "log": str(log)}) + "\n"
        )
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery ended; its errors are above"
        engine = EngineProcess(address, int(line), log)
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                FrontEndpoint(address, 5.0).facts()
            except WeightlaneError:
                assert time.monotonic() < deadline, last_lines(log)
                time.sleep(0.02)
            else:
                return engine

    def end(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("engines")
    folder.chmod(0o700)
    nursery = Nursery(folder)
    yield nursery
    nursery.end()


@pytest.fixture(scope="session")
def start_engine(model_folder: Path, nursery: Nursery) -> Callable[..., EngineProcess]:
    """Starts one more reference engine, which lives until the end of the session or of its process."""
    return lambda address="": nursery.start(model_folder, address)


@pytest.fixture(scope="session")
def engine(start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """The engine that most tests share; nobody kills it."""
    return start_engine()


@pytest.fixture(scope="session")
def ranks(model_folder: Path) -> Callable[..., RankGroup]:
    """Makes a group of ranks for a scenario of `rank_program.py`."""

    def make(
        scenario: str, world_size: int, urls: Sequence[str], placement: str = "replicated", go: str = ""
    ) -> RankGroup:
        return RankGroup(
            [str(PROGRAM), scenario],
            world_size,
            {
                "LANE_TEST_MODEL": str(model_folder),
                "LANE_TEST_URLS": ",".join(urls),
                "LANE_TEST_PLACEMENT": placement,
                "LANE_TEST_GO": go,
            },
        )

    return make


@pytest.fixture(scope="session")
def outcomes_of(ranks: Callable[..., RankGroup]) -> Callable[..., list[RankOutcome]]:
    """Runs a scenario to its end."""

    def run(scenario: str, world_size: int, urls: Sequence[str]) -> list[RankOutcome]:
        with ranks(scenario, world_size, urls) as group:
            outcomes = group.wait(100.0)
        for outcome in outcomes:
            assert outcome.status == 0, outcome.output
        return outcomes

    return run
