"""Tiny models, made once: importing transformers costs seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose much when other processes hold the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(*, tied: bool, seed: int = 0) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # large enough that greedy choices do not hang on rounding
        "initializer_range": 0.15,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if tied:
            return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)).eval()
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model(tied=False), tmp_path_factory.mktemp("untied") / "model")


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model(tied=True), tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="session")
def other_untied() -> dict[str, Any]:
    """Weights of the same model after much training, by canonical name."""
    return dict(make_model(tied=False, seed=1).state_dict())


@pytest.fixture(scope="session")
def other_tied() -> dict[str, Any]:
    return dict(make_model(tied=True, seed=1).state_dict())
