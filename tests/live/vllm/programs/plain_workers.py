"""Workers without an engine and without LoRA: vLLM's own model, as its loader leaves it, in one process."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightlane_vllm.one_rank import clean_process, place_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FakeWorker:
    """What our plugin asks of vLLM's `Worker`, around a model that is never run as a whole."""

    def __init__(self, model: Any, config: Any) -> None:
        self.rank = 0
        self.device = torch.device("cpu")
        self.vllm_config = config
        self.resets = 0
        self.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=self._reset)

    def _reset(self) -> None:
        self.resets += 1


@contextlib.contextmanager
def loaded_worker(folder: Path, **more: Any) -> Iterator[FakeWorker]:
    """The checkpoint in `folder`, loaded and processed: on a CPU with its linear weights packed away."""
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it: there is no accelerator
    with _place(folder, **more) as config:
        yield FakeWorker(get_model(vllm_config=config), config)


@contextlib.contextmanager
def built_worker(folder: Path, **more: Any) -> Iterator[FakeWorker]:
    """The model of `folder` with whatever values its parameters have, not processed."""
    with _place(folder, **more) as config:
        yield FakeWorker(initialize_model(vllm_config=config), config)


@contextlib.contextmanager
def _place(folder: Path, **more: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_process())
        stack.enter_context(place_of_rank(0, 1))
        config = EngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=128,
            skip_tokenizer_init=True,
            enforce_eager=True,
            **more,
        ).create_engine_config()
        config.compilation_config.static_forward_context = {}
        if hasattr(config.compilation_config, "static_all_moe_layers"):
            config.compilation_config.static_all_moe_layers = []
        stack.enter_context(set_default_torch_dtype(torch.float32))
        stack.enter_context(set_current_vllm_config(config))
        yield config
