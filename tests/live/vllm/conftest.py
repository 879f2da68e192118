"""Fronts over a live vLLM, and what the trainer's own model says about the same prompts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from changing_trainers import AdapterTrainer, Trainer
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightlane as wl
from weightlane.front.process import FrontProcess, start_front_process
from weightlane_vllm.launch import FrontStart, LoraStart, front_command, front_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager


# Makes `live_ways` and what lies beside it importable.
sys.path.insert(0, str(Path(__file__).parent / "ways"))
START_SECONDS = 600.0
LAYERS_PROGRAM = Path(__file__).parent / "programs/adapters_in_workers.py"

_numbers = itertools.count()


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the CPU attention kernel takes no smaller one
        vocab_size=512,
        max_position_embeddings=512,
        initializer_range=0.15,  # so that outputs of two sets of weights differ
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenized_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, which an OpenAI server insists on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_folder, folder)
    words = models.WordLevel({f"t{number}": number for number in range(512)}, unk_token="t0")  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def told_by_layers(
    vllm_python: Path,
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, dict[str, Any]]]:
    """What vLLM's own layers told without an engine, by era ("0.32", "0.27.1"); one process an era."""
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def of(era: str) -> dict[str, dict[str, Any]]:
        if era not in known:
            answer = tmp_path_factory.mktemp("layers") / "answer"
            environment = dict(os.environ)
            if era == "0.27.1":
                before = str(request.getfixturevalue("vllm_older"))
                paths = (before, os.environ.get("PYTHONPATH"))
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            words = [str(vllm_python), str(LAYERS_PROGRAM), str(tiny_folder), str(answer)]
            finished = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            assert finished.returncode == 0, finished.stderr[-4000:]
            known[era] = json.loads(answer.read_text())
        return known[era]

    return of


@pytest.fixture(scope="session")
def start_front(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[FrontProcess]]:
    """Starts vLLM on a folder at a tensor-parallel size; the block's end ends it and its workers.

    `address` is where one has been before; `older` is the folder of another vLLM; `environment` is added.
    """

    @contextmanager
    def start(
        model: Path,
        tensor_parallel: int,
        lora: LoraStart | None = None,
        *,
        address: str = "",
        older: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[FrontProcess]:
        # A socket's path is limited to about 100 bytes, which pytest's own folders can exceed.
        with tempfile.TemporaryDirectory(prefix="wl-") as private:
            front = FrontStart(
                model=str(model),
                address=address or f"unix:{private}/front",
                device="cpu",
                tensor_parallel=tensor_parallel,
                lora=lora,
            )
            with start_front_process(
                front_command(front, python=str(vllm_python)),
                front.address,
                log=tmp_path_factory.mktemp("logs") / f"vllm-{next(_numbers)}.log",
                ready_timeout_seconds=START_SECONDS,
                environment={**front_environment(front), **_with_older(older), **(environment or {})},
            ) as process:
                yield process

    return start


def _with_older(older: Path | None) -> dict[str, str]:
    if older is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(older), os.environ.get("PYTHONPATH"))))}


@pytest.fixture(scope="session")
def lora_front(
    start_front: Callable[..., AbstractContextManager[FrontProcess]], tiny_folder: Path
) -> Iterator[FrontProcess]:
    """Two workers with room for two adapters under swap `two_slot`.

    TP 2 alone: TP 1 is what the real model, the demo and an `LLM` of one's own run at, and each start costs a
    minute. With LoRA off the real model runs at TP 2.
    """
    with start_front(tiny_folder, 2, LoraStart(slots=4, rank=16)) as process:
        yield process


@pytest.fixture
def tiny_front(lora_front: FrontProcess, tiny_folder: Path) -> FrontProcess:
    """The same workers, which serve no adapter: full weights that arrive take away what was there."""
    with wl.connect(
        trainer=wl.trainer("torch", model=Trainer(tiny_folder).model),
        rollout=[wl.rollout("vllm", url=lora_front.address)],
    ) as lane:
        lane.sync(version=1)
    return lora_front


@pytest.fixture
def trainer_of() -> type[Trainer]:
    """Makes a trainer from a checkpoint folder."""
    return Trainer


@pytest.fixture
def adapter_trainer_of() -> type[AdapterTrainer]:
    """Makes a trainer of an adapter from a checkpoint folder."""
    return AdapterTrainer
