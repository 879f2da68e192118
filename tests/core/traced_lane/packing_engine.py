"""A worker engine with habits of real ones: packed layers, experts in one tensor, its own shard of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightlane.messages import WireTensor
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightlane.errors import Problem
    from weightlane.messages import ReceivePlan
    from weightlane.trace.table import PlacementTable

WIDE, EXPERTS = 4, 2
PACKED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"{name}.weight": (WIDE, WIDE) for name in PACKED},
    **{f"experts.{number}.up_proj.weight": (WIDE, WIDE) for number in range(EXPERTS)},
    "norm.weight": (WIDE,),
    "embed.weight": (6, WIDE),
}
WIRES = tuple(WireTensor(name, shape, "float32") for name, shape in SHAPES.items())
PADDED_ROWS = 8


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class FakePackedModel(nn.Module):
    """This worker's rows of everything but the norm; rows of the embedding are padded with zeros."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        rows = WIDE // workers
        self.qkv_proj = nn.Parameter(torch.zeros(3 * rows, WIDE), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(EXPERTS, rows, WIDE), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(WIDE, dtype=torch.bfloat16), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(PADDED_ROWS, WIDE), requires_grad=False)


class FakePackingEngine:
    """A `WorkerEngine` that traces. `ignores` are names that its loader accepts and writes nowhere.

    `repacks`: after each load it permutes the experts in place, as engines do that process weights for their
    kernels. `suffix` is what its loader wants behind every canonical name.
    """

    def __init__(self, worker: int = 0, workers: int = 1, *, incarnation: str = "first") -> None:
        self.worker, self.workers = worker, workers
        self.incarnation = incarnation
        self.model = FakePackedModel(workers)
        self.ignores: set[str] = set()
        self.repacks = False
        self.suffix = ""
        self.traces = 0
        self.writes: list[str] = []

    def describe(self) -> WorkerDescription:
        live = tuple(
            LiveTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.model.named_parameters()
        )
        expected = tuple(ExpectedTensor(name, shape, "float32") for name, shape in SHAPES.items())
        return WorkerDescription(
            self.worker, self.workers, "here", 1, self.incarnation, live=live, expected=expected
        )

    def current_incarnation(self) -> str:
        return self.incarnation

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        return ()

    def begin(self, version: int) -> None:
        self.writes.append("begin")

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        self.writes.append("load_weights")
        with torch.no_grad():
            self.load(tensors)
        return len(tensors)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The loader proper: this worker's rows to where the model has them."""
        rows = WIDE // self.workers
        for wire, tensor in tensors:
            if not wire.endswith(self.suffix):
                raise KeyError(f"there is no {wire}")
            name = wire.removesuffix(self.suffix)
            mine = tensor[self.worker * rows : (self.worker + 1) * rows]
            module = name.split(".")[0]
            if name in self.ignores:
                continue
            if module in PACKED:
                place = PACKED[module][1]
                self.model.qkv_proj[place * rows : (place + 1) * rows].copy_(mine)
            elif module == "experts":
                self.model.experts[int(name.split(".")[1])].copy_(mine)
            elif module == "norm":
                self.model.norm.copy_(tensor)
            else:
                self.model.embed[: tensor.shape[0]].copy_(tensor)
                self.model.embed[tensor.shape[0] :].fill_(0)

    def finish(self, version: int) -> None:
        self.writes.append("finish")
        if self.repacks:
            self.model.experts.copy_(self.model.experts.flip(0).clone())

    def publish(self, version: int) -> None:
        self.writes.append("publish")

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        self.traces += 1
        key = TableKey("fake", "1", "FakePackedModel", self.worker, self.workers, self.workers)
        sources = [
            TracedSource(item.name, item.name + self.suffix, item.shape, item.dtype) for item in tensors
        ]
        receiver = Receiver(self.model, self.load, key)
        return trace_load(receiver, sources, style=self.suffix or "plain")

    def live_tensors(self) -> Mapping[str, Tensor]:
        named: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        return named
