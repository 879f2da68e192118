"""Workers without an engine: vLLM's own model, LoRA layers and LoRA manager of any rank, in one process.

What such a worker lacks is what runs a model; how adapters are loaded, cached and dropped is all real.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from weightlane.adapter_engine import AdapterLoad
from weightlane.adapters import AdapterRef
from weightlane.peft import ModuleLora, adapter_of_modules, lora_name, peft_json
from weightlane_vllm.one_rank import clean_process, place_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

SHAPES = {  # out, in: of tests' tiny Qwen3 with every projection
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
EVERY = tuple(f"model.layers.{layer}.{part}" for layer in (0, 1) for part in SHAPES)


class FakeRunner(LoRAModelRunnerMixin):
    """vLLM's own LoRA part of a model runner, and a model that is never run."""

    def __init__(self, model: Any, config: Any) -> None:
        self.lora_config = config.lora_config
        self._model = self.load_lora_model(model, config, torch.device("cpu"))
        self.get_model = lambda: self._model


class FakeWorker:
    """The methods of vLLM's `Worker` that adapters pass through; it counts what is added."""

    def __init__(self, model: Any, config: Any) -> None:
        self.vllm_config = config
        self.model_runner = FakeRunner(model, config)
        self.added = 0

    def add_lora(self, request: Any) -> bool:
        self.added += 1
        return self.model_runner.add_lora(request)

    def remove_lora(self, number: int) -> bool:
        return self.model_runner.remove_lora(number)

    def list_loras(self) -> set[int]:
        return self.model_runner.list_loras()


@contextlib.contextmanager
def worker_of_rank(folder: Path, rank: int, workers: int) -> Iterator[FakeWorker]:
    """One worker of a tensor-parallel engine that would run the checkpoint in `folder`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_process())
        stack.enter_context(place_of_rank(rank, workers))
        config = EngineArgs(
            model=str(folder),
            dtype="float32",
            tensor_parallel_size=workers,
            max_model_len=128,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=8,
        ).create_engine_config()
        config.parallel_config.rank = rank
        config.compilation_config.static_forward_context = {}
        stack.enter_context(set_default_torch_dtype(torch.float32))
        stack.enter_context(set_current_vllm_config(config))
        yield FakeWorker(initialize_model(vllm_config=config).eval(), config)


def adapter(
    name: str = "default",
    *,
    version: int = 1,
    modules: Mapping[str, ModuleLora] | None = None,
    seed: int = 0,
) -> tuple[AdapterRef, Any, dict[str, Tensor]]:
    """Reference, configuration and whole tensors of an adapter of random values."""
    given = modules or dict.fromkeys(EVERY, ModuleLora(4, 8.0))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, lora in given.items():
        out, inside = SHAPES[".".join(module.split(".")[-2:])]
        tensors[lora_name(module, "A")] = torch.randn(lora.rank, inside, generator=generator)
        tensors[lora_name(module, "B")] = torch.randn(out, lora.rank, generator=generator)
    return AdapterRef(f"{name}@{version}", version), adapter_of_modules(name, given), tensors


def load_of(slot: str, made: tuple[AdapterRef, Any, dict[str, Tensor]]) -> AdapterLoad:
    """What core hands to a worker for it."""
    ref, config, tensors = made
    return AdapterLoad(slot, ref, config, peft_json(config), tensors)
