"""A lane to the reference engine is proven from its own loader, and refused where that loses a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from local_engines import engines, held_equal, lane_to, weights_of

from weightlane.errors import PlanError
from weightlane.messages import WireTensor
from weightlane.reference.worker import ReferenceWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

LOST = "model.layers.1.mlp.up_proj.weight"


class FakeLosingWorker(ReferenceWorker):
    """Takes one tensor, keeps quiet about it, and writes it nowhere."""

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        super().load_weights([(name, tensor) for name, tensor in tensors if name != LOST])
        self._written |= {name for name, _ in tensors}
        return len(tensors)


def test_a_lane_is_proven_and_says_so(model_folder: Path) -> None:
    weights = weights_of(model_folder)
    lane = lane_to(weights, engines(model_folder, 1))
    plan = lane.plan()
    (replica,) = plan.replicas
    assert replica.trace is not None
    assert (replica.coverage, replica.trace.elements) == ("proven", sum(t.numel() for t in weights.values()))
    assert {entry.rule for entry in plan.entries} == {"traced, plain names"}
    lane.close()


def test_a_loader_that_loses_a_tensor_is_refused_before_a_byte_moves(model_folder: Path) -> None:
    weights = weights_of(model_folder)
    (engine,) = engines(model_folder, 1)
    engine.worker = FakeLosingWorker(engine)
    for tensor in weights.values():
        tensor.add_(1.0)
    with pytest.raises(PlanError) as caught:
        lane_to(weights, [engine])
    assert [(item.kind, item.subject) for item in caught.value.problems] == [
        ("unconsumed", LOST),
        ("uncovered", LOST),
    ]
    assert engine.servable
    assert held_equal(engine, weights_of(model_folder))


def test_a_trace_leaves_an_open_sync_as_it_was(model_folder: Path) -> None:
    (engine,) = engines(model_folder, 1)
    worker = engine.worker
    weights = weights_of(model_folder)
    worker.begin(7)
    first, *rest = weights.items()
    worker.load_weights([first])
    table = worker.trace([WireTensor(name, tuple(t.shape), "float32") for name, t in weights.items()])
    assert table.obstacles == ()
    worker.load_weights(rest)
    worker.finish(7)
    assert held_equal(engine, weights)


def test_live_tensors_are_found_by_every_name_of_the_table(model_folder: Path) -> None:
    (engine,) = engines(model_folder, 1)
    wires = [WireTensor(name, tuple(t.shape), "float32") for name, t in weights_of(model_folder).items()]
    live = engine.worker.live_tensors()
    for target in engine.worker.trace(wires).targets:
        for name in (target.name, *target.aliases):
            assert tuple(live[name].shape) == target.shape
            assert isinstance(live[name], torch.Tensor)


def test_an_engine_that_let_go_of_its_weights_is_proven_all_the_same(model_folder: Path) -> None:
    # Their memory is nowhere then, which must not look as if they shared it.
    weights = weights_of(model_folder)
    (engine,) = engines(model_folder, 1)
    engine.sleep(("weights",))
    lane = lane_to(weights, [engine], release=("weights",))
    assert lane.plan().replicas[0].coverage == "proven"
    lane.sync(version=1)
    assert held_equal(engine, weights)
    lane.close()
