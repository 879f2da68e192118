"""A tiny model, reference engines in processes of their own, and ranks that run `rank_program.py`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.front.process import FrontProcess, start_front_process
from weightlane.testing.ranks import RankGroup, RankOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROGRAM = Path(__file__).with_name("rank_program.py")
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


@pytest.fixture(scope="session")
def start_engine(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], FrontProcess]]:
    """Starts one more reference engine, which lives until the end of the session or of its process."""
    with ExitStack() as running:

        def start() -> FrontProcess:
            folder = tmp_path_factory.mktemp("engine")
            folder.chmod(0o700)
            address = f"unix:{folder}/front.sock"
            argv = [sys.executable, "-m", "weightlane.reference.server"]
            argv += ["--model", str(model_folder), "--address", address, "--threads", "1"]
            return running.enter_context(
                start_front_process(
                    argv,
                    address,
                    log=folder / "engine.log",
                    ready_timeout_seconds=READY_SECONDS,
                    environment={"HF_HUB_OFFLINE": "1"},
                )
            )

        yield start


@pytest.fixture(scope="session")
def engine(start_engine: Callable[[], FrontProcess]) -> FrontProcess:
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
