"""An `LLM` object belongs to its owner and to several lanes: none takes another's weights for its own."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from labelling_llm import SECONDS, FakeLlm, sync

from weightlane import messages
from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, NotServableError
from weightlane_vllm.endpoint import LlmEndpoint
from weightlane_vllm.front_engine import LlmFrontEngine
from weightlane_vllm.lora_request import lora_path


@pytest.mark.usefixtures("fake_vllm")
def test_a_request_of_the_owner_s_own_for_an_adapter_that_went_is_refused_where_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMValidationError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    llm = FakeLlm(lora="true")
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)

    def ask(name: str, path: str = "") -> None:
        lora = SimpleNamespace(lora_name=name, lora_path=path or lora_path(AdapterRef(name, 1)))
        llm.llm_engine.output_processor.add_request(SimpleNamespace(lora_request=lora), None)

    with pytest.raises(ValueError, match=r"default@1 is not served any more\. Served: none"):
        ask("default@1")  # an LLM would step on over it for ever, or its core would end
    llm.served = (AdapterRef("default@1", 1),)
    sync(engine, 1)
    ask("default@1")
    ask("theirs", "/of/somebody/else")
    llm.served = (AdapterRef("default@2", 2),)
    engine.call_workers(messages.encode(messages.Cancel("l", 1, "whatever")), SECONDS)
    with pytest.raises(ValueError, match="Served: default@2"):
        ask("default@1")
    assert llm.llm_engine.output_processor.registered == ["default@1", "theirs"]
    engine.detach()


def test_nothing_is_written_beside_requests_that_the_owner_has_queued(
    engine: LlmFrontEngine, llm: FakeLlm
) -> None:
    llm.llm_engine.output_processor.request_states = {"0": object(), "1": object()}
    begin = messages.encode(messages.BeginInline("l", "d", 1, 1, {0: "i0", 1: "i1"}))
    del llm.told[:]
    with pytest.raises(EngineError, match=r"2 requests are queued in this vLLM LLM.*wait_for_completion"):
        engine.call_workers(begin, SECONDS)
    assert llm.told == []
    llm.llm_engine.output_processor.request_states = {}
    sync(engine, 1)
    assert "publish" in llm.told


def test_a_publication_among_adapters_forgets_prefixes_before_anything_else_is_done() -> None:
    llm = FakeLlm(lora="true")
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    sync(engine, 1)
    assert llm.told[-2:] == ["publish", "reset"]
    llm.cache_resets = False
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        engine.call_workers(messages.encode(messages.Publish("l", 1, 1)), SECONDS)
    engine.detach()


@pytest.mark.usefixtures("fake_vllm")
def test_what_one_lane_left_half_written_no_endpoint_of_the_engine_generates_from(
    llm: FakeLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane_vllm.endpoint.reference_here", lambda: "vllm")
    first, second = LlmEndpoint(llm, 5.0), LlmEndpoint(llm, 5.0)
    llm.agents[1]._not_servable_cause = "Sync 1 failed after its first write."
    begin = messages.BeginInline("l", "d", 1, 1, {0: "i0", 1: "i1"})  # of a lane that nobody knows
    first.call_workers(messages.encode(begin), 5.0)
    first.close()
    for endpoint in (second, LlmEndpoint(llm, 5.0)):
        with pytest.raises(NotServableError, match="its weights are half-written"):
            endpoint.generate([(1,)], max_tokens=2)
        endpoint.close()


@pytest.mark.usefixtures("fake_vllm")
def test_a_version_is_published_for_every_endpoint_of_the_engine() -> None:
    llm = FakeLlm(labels=False)
    first = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    second = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    sync(first, 3)
    sync(second, 4)
    for engine in (first, second):
        (generation,) = engine.generate(messages.Generate(((1,),), max_tokens=2)).generations
        assert generation.weight_version == 4
        engine.detach()
