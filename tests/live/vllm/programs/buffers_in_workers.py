"""A router's correction bias in a model of the Transformers backend: a buffer that training changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from architectures import ARCHITECTURES
from plain_workers import built_worker
from transformers import AutoConfig
from vllm.model_executor.models import registry

from weightlane.checkpoint import expected_tensors_of_config
from weightlane.messages import WireTensor
from weightlane.trace.coverage import coverage_problems
from weightlane_vllm.buffers import live_buffers, write_buffers
from weightlane_vllm.worker import VllmWorkerEngine

if TYPE_CHECKING:
    from pathlib import Path

NAME = "Glm4MoeForCausalLM"
SENT = "model.layers.1.mlp.gate.e_score_correction_bias"


class Router:
    """A worker with such a model, and the buffer of its second layer."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self.engine = VllmWorkerEngine(worker)
        self.model = worker.model_runner.get_model()
        self.name = next(name for name, _ in self.model.named_buffers() if name.endswith("correction_bias"))
        self.gate = self.model.get_submodule(self.name.rpartition(".")[0])
        self.router = self.model.get_submodule(self.name.rpartition(".gate.")[0]).router
        self.checkpoint = [
            WireTensor(item.name, item.shape, "float32") for item in expected_tensors_of_config(folder)
        ]

    @property
    def bias(self) -> torch.Tensor:
        return live_buffers(self.model)[self.name]

    def trace(self, *left_out: str, **other: Any) -> Any:
        tensors = [other.get("instead", item) if item.name == SENT else item for item in self.checkpoint]
        return self.engine.trace([item for item in tensors if item.name not in left_out])

    def routes(self) -> dict[str, str]:
        return dict(self.engine._traced.routes(self.engine.current_incarnation()).buffers)

    def sync(self, value: float, *left_out: str) -> None:
        self.engine.begin(1)
        for item in self.checkpoint:
            if item.name not in left_out:
                self.engine.load_weights([(item.name, torch.full(item.shape, value))])
        self.engine.finish(1)

    def holds(self, value: float) -> bool:
        """Whether the buffer and what the router computes with are this value."""
        used = self.router.e_score_correction_bias
        return bool((self.bias == value).all() and (used == value).all())


def problems(table: Any) -> list[str]:
    """The first is what matters; what follows from it is left out."""
    found = coverage_problems([table], {}, receiver="w")
    return [f"{item.kind} {item.subject}: {item.what}" for item in found[:1]]


def raised(function: Any, *given: Any) -> str:
    try:
        function(*given)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def observe_buffers(folder: Path) -> dict[str, Any]:
    kind, given = ARCHITECTURES[NAME]
    AutoConfig.for_model(kind, **given, architectures=[NAME]).save_pretrained(folder / NAME)
    registry._run_in_subprocess = lambda ask: ask()
    with built_worker(folder / NAME, model_impl="transformers") as worker:
        at = Router(worker, folder / NAME)
        seen: dict[str, Any] = {"model": type(at.model).__name__}
        _reached(at, seen)
        _routed(at, seen)
        return seen


def _reached(at: Router, seen: dict[str, Any]) -> None:
    table = at.trace()
    seen["problems"], seen["lands_in"] = problems(table), [*table.targets_of()[SENT]]
    seen["buffer"], seen["routes"] = at.name, at.routes()
    at.sync(1.0)
    seen["arrives"] = at.holds(1.0)
    seen["left_out"] = problems(at.trace(SENT))
    at.sync(2.0, SENT)
    seen["old_bias_left"] = at.holds(1.0)


def _routed(at: Router, seen: dict[str, Any]) -> None:
    """The same buffer, no longer one that checkpoints hold: no loader of vLLM's takes it."""
    at.gate._non_persistent_buffers_set.add("e_score_correction_bias")
    loads = at.model.load_weights
    seen["own_loader"] = raised(lambda: loads([(SENT, torch.ones(4))]))
    table = at.trace()
    seen["routed_problems"], seen["routed"] = problems(table), at.routes()
    seen["routed_lands_in"] = [*table.targets_of()[SENT]]
    at.sync(3.0)
    seen["routed_arrives"] = at.holds(3.0)
    at.bias.data = torch.zeros(4)  # an engine that puts other memory in its place
    at.sync(4.0)
    seen["rebound_arrives"] = at.holds(4.0)
    fresh = torch.zeros(4)
    for module in at.model.modules():
        if "e_score_correction_bias" in module._buffers:
            module._buffers["e_score_correction_bias"] = fresh
    at.router.e_score_correction_bias = fresh
    at.sync(5.0)
    seen["replaced_arrives"] = at.holds(5.0)
    routes = seen["routed"]
    seen["wrong_shape"] = raised(write_buffers, at.model, routes, [(SENT, torch.ones(1))])
    seen["wrong_dtype"] = raised(write_buffers, at.model, routes, [(SENT, torch.ones(4, dtype=torch.int64))])
    seen["untouched"] = at.holds(5.0)
    seen["wrong_shape_planned"] = problems(at.trace(instead=WireTensor(SENT, (1,), "float32")))
    seen["wrong_dtype_planned"] = problems(at.trace(instead=WireTensor(SENT, (4,), "int64")))
    for module in at.model.modules():
        module._buffers.pop("e_score_correction_bias", None)
    seen["gone"] = raised(write_buffers, at.model, routes, [(SENT, torch.ones(4))])
