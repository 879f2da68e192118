"""A stand-in for a vLLM `LLM` that sleeps as 0.27.1 or 0.32 does; what watches and drives it is real."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightlane.agent import WorkerAgent
from weightlane.facts import EngineFacts
from weightlane.messages import encode
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load
from weightlane_vllm.facts import (
    KV_CACHE_ALONE,
    LORA_LOAD_WEIGHTS,
    SLEEP_AVAILABLE,
    SLEEP_RECORDS,
    WEIGHT_VERSION,
    WORKER_EXTENSION,
)
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS
from weightlane_vllm.served_adapters import ServedAdapters
from weightlane_vllm.sleep_calls import tell_sleep
from weightlane_vllm.sleep_watch import SleepWatch
from weightlane_vllm.worker import VllmWorkerEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPES = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}


def sleeping_facts(*, lora: bool = False, cache_alone: bool = True, **launched: str) -> EngineFacts:
    return EngineFacts(
        engine="vllm",
        version="0.32.0" if cache_alone else "0.27.1",
        source="worker",
        attributes={
            LORA_LOAD_WEIGHTS: cache_alone,
            WORKER_EXTENSION: True,
            WEIGHT_VERSION: False,
            SLEEP_AVAILABLE: True,
            SLEEP_RECORDS: True,
            KV_CACHE_ALONE: cache_alone,
        },
        launch_arguments={
            "enable_lora": str(lora).lower(),
            "enable_sleep_mode": "true",
            "sleep_mode_backend": "cumem",
            **launched,
        },
        device="cuda",
    )


@dataclass
class FakeRecord:
    """vLLM's `AllocationData`, as far as anybody looks."""

    tag: str
    is_asleep: bool = False
    cpu_backup_tensor: object = None


class FakeModel(torch.nn.Module):
    """Three tensors under a checkpoint's names, and a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(8, 4), "norm": torch.nn.LayerNorm(4)}
        )
        self.model["norm"].bias = None
        self.lm_head = torch.nn.Linear(4, 8, bias=False)

    def load_weights(self, pairs: Any) -> None:
        live = dict(self.named_parameters())
        for name, tensor in pairs:
            live[name].data.copy_(tensor)


class FakeSleepingWorker:
    """One worker whose pool holds weights, a cache and a piece of another tag."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.records = [FakeRecord("weights"), FakeRecord("kv_cache"), FakeRecord("runtime")]
        self.model = FakeModel()
        self.model_runner = self  # vLLM's own, which has the model
        self.weights = {name: tensor.data for name, tensor in self.model.named_parameters()}
        self._weightlane_sleep_watch = SleepWatch(self, lambda: self.records)
        self._weightlane_sleep_watch.apply()

    def get_model(self) -> FakeModel:
        assert not self.records[0].is_asleep, "whoever touches memory that is not there ends a worker"
        return self.model

    def sleep(self, level: int = 1) -> None:
        for record in self.records:
            if record.is_asleep:
                continue
            record.is_asleep = True
            if record.tag == "weights" and level == 1:
                record.cpu_backup_tensor = {name: value.clone() for name, value in self.weights.items()}
            if record.tag == "weights":
                for value in self.weights.values():
                    value.fill_(float("nan"))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        for record in self.records:
            if not record.is_asleep or (tags and record.tag not in (*tags, "runtime")):
                continue
            record.is_asleep = False
            if isinstance(record.cpu_backup_tensor, dict):
                for name, value in record.cpu_backup_tensor.items():
                    self.weights[name].copy_(value)
                record.cpu_backup_tensor = None


class FakeLoadingEngine(VllmWorkerEngine):
    """The plugin's own part of the agent over a model of three tensors, which is no vLLM model."""

    def __init__(self, worker: FakeSleepingWorker, facts: EngineFacts) -> None:
        super().__init__(worker)
        self._fake, self._told = worker, facts
        worker.device = torch.device("cpu")  # type: ignore[attr-defined]

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            worker=self._fake.rank,
            workers=2,
            host=os.uname().nodename,
            process_id=os.getpid(),
            incarnation=f"i{self._fake.rank}",
            live=tuple(LiveTensor(name, shape, "float32") for name, shape in SHAPES.items()),
            expected=tuple(ExpectedTensor(name, shape, "float32") for name, shape in SHAPES.items()),
            facts=self._told,
        )

    def current_incarnation(self) -> str:
        return f"i{self._fake.rank}"

    def check_plan(self, plan: object) -> list[Any]:
        return []

    def trace(self, tensors: Any) -> Any:
        key = TableKey("vllm", self._told.version, "FakeModel", worker=self._fake.rank, workers=2)
        sources = [TracedSource(item.name, item.name, item.shape, item.dtype) for item in tensors]
        model = self._models.model
        return trace_load(Receiver(model, model.load_weights, key), sources, style="plain")

    def live_tensors(self) -> Any:
        return dict(self._fake.model.named_parameters())

    def _facts(self) -> EngineFacts:
        return self._told


class FakeOutputProcessor:
    """Where requests are registered; here come none."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        raise AssertionError


class FakeSleepingLlm:
    """`calls` has what was called of vLLM, in order. As vLLM does, it ignores in silence what makes no sense.

    `obeys` "nothing" is a CPU build: sleep and wake do nothing at all.
    """

    def __init__(self, facts: EngineFacts, *, obeys: Literal["calls", "nothing"] = "calls") -> None:
        self.calls: list[str] = []
        self._obeys = obeys
        self._cache_alone = facts.attributes[KV_CACHE_ALONE]
        self._asleep: set[str] = set()  # the executor's own notion
        self.workers = [FakeSleepingWorker(rank) for rank in range(2)]
        self.agents = [
            WorkerAgent(
                lambda _, worker=worker: FakeLoadingEngine(worker, facts), origin=f"worker {worker.rank}"
            )
            for worker in self.workers
        ]
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: None),
            output_processor=FakeOutputProcessor(),
            model_config=SimpleNamespace(model="/model"),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(worker_extension_cls=WORKER_EXTENSION_CLASS),
                model_config=SimpleNamespace(is_multimodal_model=False),
            ),
        )

    def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[bytes]:
        if method == "weightlane_sleep":
            return [tell_sleep(worker) for worker in self.workers]
        if method == "weightlane_adapters":  # asked where it runs with LoRA
            return [encode(ServedAdapters(())) for _ in self.workers]
        assert method == "weightlane_agent"
        return [agent.handle(args[0]) for agent in self.agents]

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep({level})")
        ignored = "weights" in self._asleep if self._cache_alone else bool(self._asleep)
        if self._obeys == "nothing" or level == 0 or ignored:
            return
        for worker in self.workers:
            worker.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up({', '.join(tags or ())})")
        if not self._asleep.issuperset(tags or ()):
            return
        for worker in self.workers:
            worker.wake_up(tags)
        self._asleep -= set(tags or self._asleep)

    def release_kv_cache_memory(self) -> None:
        assert self._cache_alone, "0.27.1 has no such method"
        assert not self._asleep
        self.calls.append("release_kv_cache_memory()")
        if self._obeys == "nothing":
            return
        self._asleep = {"kv_cache"}
        for worker in self.workers:
            worker.records[1].is_asleep = True

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache()")
        return True

    def generate(
        self, prompts: list[Any], parameters: Any, *, use_tqdm: bool, lora_request: Any
    ) -> list[Any]:
        assert not self._asleep
        values = [float(worker.weights["model.norm.weight"][0]) for worker in self.workers]
        assert len(set(values)) == 1
        logprobs = [{5: SimpleNamespace(logprob=values[0])}]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5], logprobs=logprobs)]) for _ in prompts]
