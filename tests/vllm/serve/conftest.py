"""Stand-ins for the modules of vLLM that a front beside its server is opened through."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sleep"))


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


class FakeVllm:
    """Fresh classes with the three methods, in modules of vLLM's names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

        @dataclass
        class FakeParallelConfig:
            worker_extension_cls: str = ""
            _api_process_count: int = 1

            def __post_init__(self) -> None:
                self.checked = True

        class FakeAsyncLlm:
            def __init__(self) -> None:
                self.handlers = 0
                self._run_output_handler()

            def _run_output_handler(self) -> None:
                self.handlers += 1

        class FakeServingModels:
            def __init__(self) -> None:
                self.lora_requests: dict[str, Any] = {}
                self.loaded = False

            async def init_static_loras(self) -> None:
                self.loaded = True

        self.ParallelConfig, self.AsyncLLM = FakeParallelConfig, FakeAsyncLlm
        self.OpenAIServingModels = FakeServingModels
        request: Callable[..., Any] = lambda *given: given  # noqa: E731 - stands for a class
        self.put("vllm.lora.request", LoRARequest=request)
        self.put("vllm.v1.engine.async_llm", AsyncLLM=FakeAsyncLlm)
        self.put("vllm.entrypoints.openai.models.serving", OpenAIServingModels=FakeServingModels)
        self.put("vllm.envs", VLLM_USE_RUST_FRONTEND=False)
        self.put("vllm", envs=sys.modules["vllm.envs"])

    def put(self, name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        self._patch.setitem(sys.modules, name, module)
        parent, _, _ = name.rpartition(".")
        if parent and parent not in sys.modules:
            self.put(parent)
