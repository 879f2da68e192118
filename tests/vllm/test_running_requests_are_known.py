"""Requests by the adapter that they name, over a stand-in for `AsyncLLM` and its output processor."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightlane.adapters import AdapterRef
from weightlane_vllm.lora_request import lora_path
from weightlane_vllm.running_requests import running_requests_of, unguard


class FakeOutputProcessor:
    """Registers requests, as vLLM's does, before the engine core hears of them."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        self.request_states[request.request_id] = SimpleNamespace(lora_request=request.lora_request)


class FakeAsyncLlm:
    def __init__(self) -> None:
        self.output_processor = FakeOutputProcessor()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeAsyncLlm:
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMValidationError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    return FakeAsyncLlm()


def ask(engine: FakeAsyncLlm, number: str, name: str = "", version: int = 0, *, path: str = "") -> None:
    lora = None
    if name:
        lora = SimpleNamespace(lora_name=name, lora_path=path or lora_path(AdapterRef(name, version)))
    engine.output_processor.add_request(SimpleNamespace(request_id=number, lora_request=lora), None)


def test_requests_are_found_by_the_adapter_that_they_name(engine: FakeAsyncLlm) -> None:
    ask(engine, "a", "default@1", 1)
    ask(engine, "b", "default@2", 2)
    ask(engine, "c")
    ask(engine, "d", "default@1", path="/of/somebody/else")
    requests = running_requests_of(engine)
    assert requests.naming({"default@1"}) == ["a"]
    assert requests.naming_none_of({"default@1"}) == ["b"]
    assert running_requests_of(engine) is requests, "whatever lanes come and go"


def test_a_request_that_names_what_is_not_served_is_refused_before_the_engine_core_hears_of_it(
    engine: FakeAsyncLlm,
) -> None:
    requests = running_requests_of(engine)
    ask(engine, "before", "default@1", 1)
    requests.admit_only({"default@2"})
    with pytest.raises(ValueError, match=r"default@1 is not served any more\. Served: default@2"):
        ask(engine, "late", "default@1", 1)
    ask(engine, "now", "default@2", 2)
    ask(engine, "base")
    ask(engine, "foreign", "theirs", path="/of/somebody/else")
    assert set(engine.output_processor.request_states) == {"before", "now", "base", "foreign"}
    requests.admit_only({"default@3"})
    with pytest.raises(ValueError, match="default@2 is not served"):
        ask(engine, "later", "default@2", 2)


def test_the_guard_can_be_taken_off(engine: FakeAsyncLlm) -> None:
    running_requests_of(engine).admit_only(())
    unguard(engine)
    unguard(engine)
    ask(engine, "a", "default@1", 1)
    assert set(engine.output_processor.request_states) == {"a"}


def test_an_engine_is_freed_as_before(engine: FakeAsyncLlm) -> None:
    mine = FakeAsyncLlm()
    running_requests_of(mine).admit_only(())
    processor = weakref.ref(mine.output_processor)
    del mine
    gc.collect()
    assert processor() is None
