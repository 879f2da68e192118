"""The front's engine over a stand-in for vLLM's `LLM`; agents are real, their engine is a stand-in too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from labelling_llm import FakeLlm, completion, sync

from weightlane import messages
from weightlane.adapters import AdapterRef
from weightlane.agent import WorkerAgent
from weightlane.errors import EngineError, PluginError
from weightlane_vllm.engine_calls import Made
from weightlane_vllm.front_engine import LlmFrontEngine
from weightlane_vllm.lora_request import lora_number


def stamped(engine: LlmFrontEngine, completion: Any) -> messages.Generation:
    """As one that ends now."""
    return engine._generation(
        Made(SimpleNamespace(outputs=[completion]), None, engine._calls._requests.published)  # type: ignore[attr-defined]
    )


def test_facts_are_the_workers_own(engine: LlmFrontEngine) -> None:
    assert engine.facts().source == "worker"


@pytest.mark.requirement("R59")
def test_a_published_version_labels_the_engine(engine: LlmFrontEngine, llm: FakeLlm) -> None:
    assert all(isinstance(reply, messages.Done) for reply in sync(engine, 7))
    assert llm.label == "7"
    assert stamped(engine, completion("7")) == messages.Generation((5, 6), (-0.5, -0.25), 7)


def test_a_refused_publish_labels_nothing(engine: LlmFrontEngine, llm: FakeLlm) -> None:
    replies = engine.call_workers(messages.encode(messages.Publish("l", 1, 7)), 5.0)
    assert all(
        isinstance(messages.decode(reply, messages.AgentReply, sender="worker"), messages.Failure)
        for reply in replies
    )
    assert llm.label == "default"
    assert stamped(engine, completion("default")).weight_version is None


def test_a_label_set_by_somebody_else_is_an_error(engine: LlmFrontEngine) -> None:
    sync(engine, 7)
    with pytest.raises(EngineError, match="labelled 8"):
        stamped(engine, completion("8"))


@pytest.mark.usefixtures("fake_vllm")
def test_a_request_names_an_adapter_by_what_the_workers_serve_and_is_stamped_with_its_version() -> None:
    llm = FakeLlm(lora="true")
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    llm.served = (AdapterRef("default@3", 3),)
    (generation,) = engine.generate(messages.Generate(((1,),), max_tokens=2, adapter="default@3")).generations
    assert generation.weight_version == 3
    assert llm.named == (
        "default@3",
        lora_number("default@3"),
        "/weightlane/adapters-in-memory/default@3/3",
    )
    with pytest.raises(EngineError, match="names no adapter"):
        engine.generate(messages.Generate(((1,),), max_tokens=2))
    engine.detach()


@pytest.mark.usefixtures("fake_vllm")
def test_an_adapter_named_to_an_engine_without_lora_is_an_error(engine: LlmFrontEngine) -> None:
    with pytest.raises(EngineError, match="started without LoRA"):
        engine.generate(messages.Generate(((1,),), max_tokens=2, adapter="default"))


@pytest.mark.usefixtures("fake_vllm")
def test_a_continuation_of_another_length_is_an_error(engine: LlmFrontEngine) -> None:
    (generation,) = engine.generate(messages.Generate(((1,),), max_tokens=2)).generations
    assert generation.token_ids == (5, 6)
    with pytest.raises(EngineError, match="vLLM continued prompt 0 by 2 tokens with 2 log-probs, not by 3"):
        engine.generate(messages.Generate(((1,),), max_tokens=3))


def test_an_engine_without_labels_is_stamped_with_what_was_published() -> None:
    engine = LlmFrontEngine(FakeLlm(labels=False), backend="vllm", start_seconds=5.0)
    sync(engine, 3)
    unlabelled = completion("")
    unlabelled.weight_versions = None
    assert stamped(engine, unlabelled).weight_version == 3
    engine.detach()


def test_an_engine_whose_outputs_carry_no_label_is_stamped_likewise() -> None:
    llm = FakeLlm(labels_outputs=False)
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    sync(engine, 3)
    output = completion("")
    del output.weight_versions  # 0.27.1 has no such field
    assert stamped(engine, output).weight_version == 3
    assert llm.label == "3", "it can be told all the same"
    engine.detach()


@pytest.mark.requirement("R82")
def test_a_cache_that_did_not_reset_is_an_error(engine: LlmFrontEngine, llm: FakeLlm) -> None:
    assert engine.call("reset_prefix_cache", 5.0) == "reset"
    llm.cache_resets = False
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        engine.call("reset_prefix_cache", 5.0)


def test_an_llm_without_our_extension_is_refused_with_the_argument_to_give() -> None:
    with pytest.raises(EngineError, match="worker_extension_cls='weightlane_vllm"):
        LlmFrontEngine(FakeLlm(extension=""), backend="vllm", start_seconds=5.0)


def test_a_worker_that_cannot_describe_itself_raises_its_own_error() -> None:
    def broken(_: str) -> Any:
        raise PluginError("Backend vllm is not available in the engine's environment.")

    llm = FakeLlm()
    llm.agents[1] = WorkerAgent(broken, origin="worker 1")
    with pytest.raises(PluginError, match="not available"):
        LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
