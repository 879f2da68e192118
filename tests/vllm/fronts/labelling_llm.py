"""A stand-in for `LLM` whose two workers have agents and whose engine core labels what it generates."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from weightlane import messages
from weightlane.agent import WorkerAgent
from weightlane.facts import EngineFacts
from weightlane.receiver import WorkerDescription
from weightlane_vllm.facts import SAMPLE_VERSIONS, WEIGHT_VERSION
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS
from weightlane_vllm.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from weightlane.adapters import AdapterRef
    from weightlane_vllm.front_engine import LlmFrontEngine

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
