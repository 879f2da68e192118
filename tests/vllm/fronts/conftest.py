"""Makes `labelling_llm` importable, and the fixtures over it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from labelling_llm import FakeLlm

from weightlane_vllm.front_engine import LlmFrontEngine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def engine(llm: FakeLlm) -> Iterator[LlmFrontEngine]:
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    yield engine
    engine.detach()


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)
    request: Any = lambda *given: given  # noqa: E731 - stands for a class
    monkeypatch.setattr(sys.modules["vllm.lora.request"], "LoRARequest", request, raising=False)
