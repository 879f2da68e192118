"""Live SGLang servers, and what the trainer's own model says about the same prompts."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import torch
from changing_trainers import AdapterTrainer
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weightlane.contexts import BuildRequestsContext, RolloutTarget
from weightlane.demo.interpreter import import_folders
from weightlane.program import with_lifecycle
from weightlane.testing.greedy import forced_logprobs, greedy_continuations
from weightlane.testing.parity_trainer import change_weights
from weightlane.types import Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.adapter_launch import lora_arguments as lora_arguments_of
from weightlane_sglang.endpoint import SglangEndpoint
from weightlane_sglang.launch import RunningServer, ServerSettings, launched_server, loader_arguments
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from weightlane.messages import Generation
    from weightlane.program import Program

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # makes `server_checks` importable

LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
)
OUR_TESTS_LOADERS = ("live_loaders.checksums", "live_loaders.oracle", "live_loaders.change_one")

_numbers = itertools.count()
torch.set_num_threads(1)  # spinning threads of ours would take the server's cores


class StartServer(Protocol):
    """Starts SGLang on a folder at a tensor-parallel size; the block's end ends it and its children."""

    def __call__(
        self, model: Path, tensor_parallel: int, *, arguments: tuple[str, ...] = (), newer: Path | None = None
    ) -> AbstractContextManager[RunningServer]: ...


@pytest.fixture(scope="session", autouse=True)
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where servers and trainers of these tests meet."""
    folder = tmp_path_factory.mktemp("meet") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is its embedding, and its vocabulary no multiple of what engines pad to."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=500,  # padded to 512 by the engine
        max_position_embeddings=256,
        initializer_range=0.15,  # so that outputs of two sets of weights differ
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_server(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Servers that let our code in; `newer` holds another SGLang than the environment does."""
    loader = loader_arguments(import_folders(sglang_python, "sglang", option="--sglang-python"))
    if not loader:
        pytest.fail(f"the environment of {sglang_python} holds no weightlane-sglang", pytrace=False)

    def start(
        model: Path, tensor_parallel: int, *, arguments: tuple[str, ...] = (), newer: Path | None = None
    ) -> AbstractContextManager[RunningServer]:
        log = tmp_path_factory.mktemp("logs") / f"sglang-{next(_numbers)}.log"
        before = [newer] if newer else []
        settings = ServerSettings(
            sglang_python,
            model,
            "cpu",
            tensor_parallel,
            arguments=(*arguments, *loader, *OUR_TESTS_LOADERS),
            environment={"PYTHONPATH": ":".join(map(str, (*before, HERE / "in_server")))},
        )
        return launched_server(settings, log=log)

    return start


@pytest.fixture(scope="session")
def start_closed_server(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], AbstractContextManager[RunningServer]]:
    """Servers that let nothing of ours in."""

    def start(model: Path) -> AbstractContextManager[RunningServer]:
        log = tmp_path_factory.mktemp("logs") / f"sglang-{next(_numbers)}.log"
        return launched_server(ServerSettings(sglang_python, model, "cpu"), log=log)

    return start


# TP 2 alone: TP 1 is what the real model, the kills and the demo run at, and each start costs a minute.
@pytest.fixture(scope="session", params=[2], ids=["tp2"])
def tiny_server(
    request: pytest.FixtureRequest,
    start_server: StartServer,
    tiny_folder: Path,
) -> Iterator[RunningServer]:
    with start_server(tiny_folder, request.param) as server:
        yield server


@pytest.fixture(scope="session")
def newer_server(start_server: StartServer, sglang_newer: Path, tiny_folder: Path) -> Iterator[RunningServer]:
    """SGLang 0.5.23, which takes updates in sessions, at TP 2."""
    with start_server(tiny_folder, 2, newer=sglang_newer) as server:
        yield server


@pytest.fixture(scope="session")
def lora_server(start_server: StartServer, tiny_folder: Path) -> Iterator[RunningServer]:
    """Two ranks, started for one lane's adapters of rank 16 at most, as `launch-args` says."""
    with start_server(tiny_folder, 2, arguments=lora_arguments_of(16, "two_slot", device="cpu")) as server:
        yield server


@pytest.fixture(scope="session")
def newer_lora_server(
    start_server: StartServer, tiny_folder: Path, sglang_newer: Path
) -> Iterator[RunningServer]:
    """SGLang of update sessions, with LoRA on."""
    with start_server(tiny_folder, 1, arguments=LORA, newer=sglang_newer) as server:
        yield server


@pytest.fixture
def adapter_trainer_of() -> type[AdapterTrainer]:
    """Makes a trainer of an adapter from a checkpoint folder."""
    return AdapterTrainer


@pytest.fixture(scope="session")
def lora_arguments() -> tuple[str, ...]:
    """What turns LoRA on in a server, for every module."""
    return LORA


class Trainer:
    """A model that changes, and what it says itself."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Its checkpoint, without what is tied to something else."""
        seen: set[int] = set()
        named: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                named.append((name, tensor))
            seen.add(id(tensor))
        return named

    def change(self, seed: int, noise: float = 0.05) -> float:
        """Moves every matrix; gives by how much that moved the model's own log-probs."""
        prompts = ((1, 2, 3, 4, 5), (400, 7, 99))
        said = greedy_continuations(self.model, prompts, 4)
        before = forced_logprobs(self.model, prompts, said)
        change_weights(self.model, noise=noise, seed=seed)
        after = forced_logprobs(self.model, prompts, said)
        return max(float((old - new).abs().max()) for old, new in zip(before, after, strict=True))

    def distance(self, prompts: Sequence[Sequence[int]], given: Sequence[Generation]) -> float:
        """Largest difference of a chosen token's log-prob; infinite when tokens differ."""
        said = greedy_continuations(self.model, prompts, len(given[0].token_ids))
        if [own.token_ids for own in said] != [generation.token_ids for generation in given]:
            return float("inf")
        return max(
            abs(mine - theirs)
            for own, generation in zip(said, given, strict=True)
            for mine, theirs in zip(own.logprobs, generation.logprobs, strict=True)
        )


@pytest.fixture
def trainer_of() -> type[Trainer]:
    """Makes a trainer from a checkpoint folder."""
    return Trainer


@pytest.fixture
def open_server() -> Iterator[Callable[[RunningServer], SglangEndpoint]]:
    """Opens handles on servers; all are closed at the end."""
    opened: list[SglangEndpoint] = []

    def open_one(server: RunningServer) -> SglangEndpoint:
        opened.append(SglangEndpoint(RolloutTarget("sglang", address=server.url), timeout_seconds=120))
        return opened[-1]

    yield open_one
    for endpoint in opened:
        endpoint.close()


@pytest.fixture
def program_of() -> Callable[[SglangEndpoint], Program]:
    """The program that the plugin makes for a live server."""

    def make(endpoint: SglangEndpoint) -> Program:
        descriptor, *_ = plugin.weightlane_register_backends()
        context = BuildRequestsContext(
            descriptor, endpoint.facts(), Phase.FULL, TransportName.INLINE, (), (), (), "counts"
        )
        return with_lifecycle(
            plugin.weightlane_build_requests(context), plugin.weightlane_plan_lifecycle(context)
        )

    return make
