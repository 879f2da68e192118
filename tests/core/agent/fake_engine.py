"""A worker engine that is a dictionary of tensors, and messages for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightlane.agent import WorkerAgent
from weightlane.buckets import lay_out_buckets
from weightlane.failures import error_of
from weightlane.messages import (
    AgentReply,
    AgentRequest,
    Attach,
    BeginInline,
    Failure,
    LoadInline,
    ReceivePlan,
    WireTensor,
    decode,
    encode,
)
from weightlane.packing import dtype_name, memory_of, pack_bucket
from weightlane.receiver import ExpectedTensor, WorkerDescription

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.errors import Problem

WEIGHTS = {"a": torch.arange(3.0), "b": torch.tensor([True, False]), "c": torch.arange(40).bfloat16()}
WIRES = tuple(WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in WEIGHTS.items())


class FakeWorkerEngine:
    """Copies what it is handed, as the contract asks; `keeps_views` makes it break the contract.

    Its checkpoint has `prefix` before every name that its loader takes.
    """

    def __init__(self, *, worker: int = 0, incarnation: str = "first", prefix: str = "") -> None:
        self.prefix = prefix
        self.worker = worker
        self.incarnation = incarnation
        self.held: dict[str, Tensor] = {}
        self.calls: list[str] = []
        self.problems: list[Problem] = []
        self.raises: dict[str, Exception] = {}
        self.keeps_views = False
        self.loads = 0

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            worker=self.worker,
            workers=1,
            host="here",
            process_id=1,
            incarnation=self.incarnation,
            expected=tuple(ExpectedTensor(self.prefix + wire.name, wire.shape) for wire in WIRES),
        )

    def current_incarnation(self) -> str:
        return self.describe().incarnation

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        self._note("check_plan")
        return self.problems

    def begin(self, version: int) -> None:
        self._note("begin")

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        self._note("load_weights")
        self.held.update((name, tensor if self.keeps_views else tensor.clone()) for name, tensor in tensors)
        return len(tensors)

    def finish(self, version: int) -> None:
        self._note("finish")

    def publish(self, version: int) -> None:
        self._note("publish")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.raises:
            raise self.raises[call]

    @property
    def writes(self) -> list[str]:
        return [call for call in self.calls if call not in ("describe", "check_plan")]


def agent_of_fake(engine: FakeWorkerEngine) -> WorkerAgent:
    return WorkerAgent(lambda backend: engine, origin="worker 0 (FakeWorkerEngine)")


def plan(**fields: Any) -> ReceivePlan:
    buckets = lay_out_buckets(WIRES, bucket_bytes=64)
    return ReceivePlan(
        **{
            "lane": "lane-1",
            "plan_digest": "p1",
            "backend": "fake",
            "transport": "inline",
            "tensors": WIRES,
            "buckets": buckets,
        }
        | fields
    )


def ask(agent: WorkerAgent, request: AgentRequest) -> Any:
    """The answer; a Failure as the error that it is."""
    reply: AgentReply = decode(agent.handle(encode(request)), AgentReply, sender="the fake")
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply


def begin(sync: int = 1, version: int = 10, **fields: Any) -> BeginInline:
    return BeginInline(
        **{
            "lane": "lane-1",
            "plan_digest": "p1",
            "sync": sync,
            "version": version,
            "incarnation": {0: "first"},
        }
        | fields
    )


def load(bucket: int, *, sync: int = 1, weights: dict[str, Tensor] = WEIGHTS) -> LoadInline:
    layout = plan().buckets[bucket]
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    values = list(weights.values())
    pack_bucket(memory, layout, WIRES, [(entry.tensor, values[entry.tensor]) for entry in layout.entries])
    return LoadInline("lane-1", sync, bucket, bytes(memory_of(memory)))


def attached(engine: FakeWorkerEngine, **fields: Any) -> WorkerAgent:
    agent = agent_of_fake(engine)
    ask(agent, Attach(plan(**fields)))
    engine.calls.clear()
    return agent
