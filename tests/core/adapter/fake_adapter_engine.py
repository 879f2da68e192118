"""A worker engine that holds adapters in a dictionary, and messages for its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightlane.adapters import (
    AdapterBinding,
    AdapterExpression,
    AdapterPlan,
    BoundModule,
    TrainedBase,
)
from weightlane.agent import WorkerAgent
from weightlane.buckets import BucketLayout, lay_out_buckets
from weightlane.failures import error_of
from weightlane.messages import (
    AgentReply,
    AgentRequest,
    Attach,
    BeginInline,
    Failure,
    FinishInline,
    LoadInline,
    Publish,
    ReceivePlan,
    WireTensor,
    decode,
    encode,
)
from weightlane.packing import memory_of, pack_bucket
from weightlane.peft import AdapterConfig, lora_name, peft_json
from weightlane.receiver import ExpectedTensor, WorkerDescription
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import SwapPolicy
    from weightlane.errors import Problem

MODULES = ("layers.0.q", "layers.0.v", "layers.1.q")
BASE = TrainedBase("the base")
CONFIG = AdapterConfig("policy", 2, 4.0, MODULES)
NAMES = tuple(lora_name(module, side) for module in MODULES for side in ("A", "B"))
WIRES = tuple(WireTensor(name, (2, 8) if ".lora_A." in name else (8, 2), "float32") for name in NAMES)
FULL = tuple(WireTensor(f"{module}.weight", (8, 8), "float32") for module in MODULES)


def values(version: int) -> dict[str, Tensor]:
    return {wire.name: torch.full(wire.shape, 100.0 * version + number) for number, wire in enumerate(WIRES)}


def buckets(*, empty_last: bool = False) -> tuple[BucketLayout, ...]:
    """Three buckets of two matrices; or these and an empty one that marks the end."""
    from msgspec.structs import replace

    full = lay_out_buckets(WIRES, bucket_bytes=128)
    if not empty_last:
        return full
    return (*(replace(layout, last=False) for layout in full), BucketLayout(len(full), 1, 0, (), last=True))


class FakeAdapterEngine:
    """Keeps the tensors that it is given as they are; `loses` names modules that it fails to bind."""

    def __init__(self) -> None:
        self.slots: dict[str, AdapterLoad] = {}
        self.serving = ""
        self.calls: list[str] = []
        self.raises: dict[str, Exception] = {}
        self.loses: tuple[str, ...] = ()
        self.scale = 1.0

    def describe(self) -> WorkerDescription:
        expected = tuple(ExpectedTensor(wire.name, wire.shape) for wire in FULL)
        return WorkerDescription(0, 1, "here", 1, "first", expected=expected)

    def current_incarnation(self) -> str:
        return self.describe().incarnation

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        return ()

    def begin(self, version: int) -> None:
        self._note("begin")

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        self._note("load_weights")
        return len(tensors)

    def finish(self, version: int) -> None:
        self._note("finish")

    def publish(self, version: int) -> None:
        self._note("publish")

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        self._note(f"load {load.slot}")
        assert load.slot != self.serving, "what serves is not to be replaced"
        self.slots[load.slot] = load
        # From the tensors that came: an engine binds what it is given, whatever it was told to expect.
        modules = dict.fromkeys(
            name.split(".lora_")[0].removeprefix("base_model.model.") for name in load.tensors
        )
        bound = [module for module in modules if module not in self.loses]
        scaling = load.config.scaling * self.scale
        return AdapterBinding(
            load.ref, tuple(BoundModule(module, load.config.rank, scaling) for module in bound)
        )

    def serve_adapter(self, slot: str) -> None:
        self._note(f"serve {slot}")
        self.serving = slot

    def remove_adapter(self, slot: str) -> None:
        self._note(f"remove {slot}")
        del self.slots[slot]
        self.serving = "" if self.serving == slot else self.serving

    @property
    def served(self) -> dict[str, Tensor]:
        return dict(self.slots[self.serving].tensors)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        for start, error in self.raises.items():
            if call.startswith(start):
                raise error


def plan(swap: SwapPolicy = "two_slot", **fields: Any) -> ReceivePlan:
    adapter = AdapterPlan(CONFIG, AdapterExpression(swap, peft_json(CONFIG)), BASE)
    return ReceivePlan(
        **{
            "lane": "lane-1",
            "plan_digest": "p1",
            "backend": "fake",
            "transport": "inline",
            "tensors": WIRES,
            "buckets": buckets(),
            "phase": Phase.ADAPTER,
            "adapter": adapter,
        }
        | fields
    )


def full_plan() -> ReceivePlan:
    return plan(lane="lane-2", tensors=FULL, buckets=lay_out_buckets(FULL), phase=Phase.FULL, adapter=None)


def ask(agent: WorkerAgent, request: AgentRequest) -> Any:
    """The answer; a Failure as the error that it is."""
    reply: AgentReply = decode(agent.handle(encode(request)), AgentReply, sender="the fake")
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply


def attached(
    engine: Any, received: ReceivePlan | None = None, kind: type[WorkerAgent] = WorkerAgent
) -> WorkerAgent:
    agent = kind(lambda backend: engine, origin="worker 0 (FakeAdapterEngine)")
    ask(agent, Attach(received or plan()))
    return agent


def begin(agent: WorkerAgent, sync: int, version: int, lane: str = "lane-1") -> None:
    ask(agent, BeginInline(lane, "p1", sync, version, {0: "first"}))


def load(agent: WorkerAgent, sync: int, bucket: int, tensors: dict[str, Tensor], layouts: Any = None) -> None:
    layout = (layouts or buckets())[bucket]
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    ordered = list(tensors.values())
    if layout.entries:
        pack_bucket(
            memory, layout, WIRES, [(entry.tensor, ordered[entry.tensor]) for entry in layout.entries]
        )
    ask(agent, LoadInline("lane-1", sync, bucket, bytes(memory_of(memory))))


def stage(agent: WorkerAgent, sync: int, version: int, layouts: Any = None) -> Any:
    begin(agent, sync, version)
    for bucket in range(len(layouts or buckets())):
        load(agent, sync, bucket, values(version), layouts)
    return ask(agent, FinishInline("lane-1", sync))


def whole_sync(agent: WorkerAgent, sync: int, version: int) -> Any:
    report = stage(agent, sync, version)
    ask(agent, Publish("lane-1", sync, version))
    return report
