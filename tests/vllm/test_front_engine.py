"""The front's engine over a stand-in for vLLM's `LLM`; agents are real, their engine is a stand-in too."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightlane import messages
from weightlane.adapters import AdapterRef
from weightlane.agent import WorkerAgent
from weightlane.errors import EngineError, NotServableError, PluginError
from weightlane.facts import EngineFacts
from weightlane.receiver import WorkerDescription
from weightlane_vllm.endpoint import LlmEndpoint
from weightlane_vllm.engine_calls import Made
from weightlane_vllm.facts import SAMPLE_VERSIONS, WEIGHT_VERSION
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS, LlmFrontEngine
from weightlane_vllm.lora_request import lora_number, lora_path
from weightlane_vllm.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from collections.abc import Iterator


SECONDS = 60.0  # the first bucket imports torch


class FakeWorkerEngine:
    """Describes itself and accepts everything."""

    def __init__(self, rank: int, facts: EngineFacts) -> None:
        self._rank, self._facts = rank, facts

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            worker=self._rank,
            workers=2,
            host="here",
            process_id=os.getpid(),
            incarnation=f"i{self._rank}",
            facts=self._facts,
        )

    def current_incarnation(self) -> str:
        return self.describe().incarnation

    def check_plan(self, plan: object) -> list[Any]:
        return []

    def begin(self, version: int) -> None: ...

    def load_weights(self, tensors: list[Any]) -> int:
        return len(tensors)

    def finish(self, version: int) -> None: ...

    def publish(self, version: int) -> None: ...


class FakeOutputProcessor:
    """Registers requests, as vLLM's does, before the engine core hears of them."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.request_states: dict[str, Any] = {}

    def add_request(
        self, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        self.registered.append(request.lora_request.lora_name)


class FakeLlm:
    """Two workers with agents, and an engine core that labels what it generates."""

    def __init__(
        self,
        *,
        labels: bool = True,
        labels_outputs: bool = True,
        extension: str = WORKER_EXTENSION_CLASS,
        lora: str = "false",
    ) -> None:
        attributes = {WEIGHT_VERSION: labels, SAMPLE_VERSIONS: labels and labels_outputs}
        facts = EngineFacts(
            engine="vllm",
            version="0.32.0",
            source="worker",
            attributes=attributes,
            launch_arguments={"enable_lora": lora},
        )
        self.served: tuple[AdapterRef, ...] = ()
        self.named: Any = None
        self.told: list[str] = []
        self.agents = [
            WorkerAgent(lambda _, rank=rank: FakeWorkerEngine(rank, facts), origin=f"worker {rank}")
            for rank in range(2)
        ]
        self.label = "default"
        self.cache_resets = True
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(),
            output_processor=FakeOutputProcessor(),
            model_config=SimpleNamespace(model="/model"),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(worker_extension_cls=extension),
                model_config=SimpleNamespace(is_multimodal_model=False),
            ),
            set_weight_version=lambda version: setattr(self, "label", version),
        )

    def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[bytes]:
        if method == "weightlane_adapters":
            return [messages.encode(ServedAdapters(self.served)) for _ in self.agents]
        assert method == "weightlane_agent"
        self.told.append("publish" if b"publish" in args[0] else "message")
        return [agent.handle(args[0]) for agent in self.agents]

    def generate(
        self, prompts: list[Any], parameters: Any, *, use_tqdm: bool, lora_request: Any
    ) -> list[Any]:
        self.named = lora_request
        return [SimpleNamespace(outputs=[completion(self.label)]) for _ in prompts]

    def reset_prefix_cache(self) -> bool:
        self.told.append("reset")
        return self.cache_resets


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def engine(llm: FakeLlm) -> Iterator[LlmFrontEngine]:
    engine = LlmFrontEngine(llm, backend="vllm", start_seconds=5.0)
    yield engine
    engine.detach()


def sync(engine: LlmFrontEngine, version: int) -> list[Any]:
    plan = messages.ReceivePlan(
        lane="l", plan_digest="d", backend="vllm", transport="inline", tensors=(), buckets=_one_empty_bucket()
    )
    incarnation = {0: "i0", 1: "i1"}
    replies: list[Any] = []
    for request in (
        messages.Attach(plan),
        messages.BeginInline("l", "d", 1, version, incarnation),
        messages.LoadInline("l", 1, 0, b""),
        messages.FinishInline("l", 1),
        messages.Publish("l", 1, version),
    ):
        data = engine.call_workers(messages.encode(request), SECONDS)
        replies = [messages.decode(reply, messages.AgentReply, sender="worker") for reply in data]
    return replies


def _one_empty_bucket() -> Any:
    from weightlane.buckets import lay_out_buckets

    return lay_out_buckets(())


def completion(label: str) -> Any:
    return SimpleNamespace(
        token_ids=[5, 6],
        logprobs=[{5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-0.25)}],
        weight_versions=[SimpleNamespace(version=label)],
    )


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


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)
    request: Any = lambda *given: given  # noqa: E731 - stands for a class
    monkeypatch.setattr(sys.modules["vllm.lora.request"], "LoRARequest", request, raising=False)


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
