"""Over every transport the first sync is read back, and an engine that repacks in place is not published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from local_engines import change, engines, held_equal, lane_to, versions_held, weights_of

from weightlane.errors import UsageError, VerificationError
from weightlane.reference.worker import ReferenceWorker

if TYPE_CHECKING:
    from pathlib import Path

TRANSPORTS = ("inprocess", "shm", "inline", "disk")
REPACKED = "model.layers.0.mlp.gate_proj.weight"


class FakeRepackingWorker(ReferenceWorker):
    """Post-processes one tensor in place: same name, shape, strides and dtype, other order of rows."""

    def finish(self, version: int) -> None:
        super().finish(version)
        live = self.live_tensors()[REPACKED]
        with torch.no_grad():
            live.copy_(live.flip(0).clone())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_first_sync_is_read_back(model_folder: Path, transport: str) -> None:
    weights = weights_of(model_folder)
    (engine,) = engines(model_folder, 1)
    lane = lane_to(weights, [engine], transport=transport)
    (first,), (second,) = lane.sync(version=1).replicas, lane.sync(version=2).replicas
    lane.close()
    elements = sum(tensor.numel() for tensor in weights.values())
    assert first.workers[0].read_back is not None
    assert first.workers[0].read_back.elements == elements
    assert f"{elements:,} elements read back equal on 1" in first.verified
    assert second.workers[0].read_back is None
    assert "read back" not in second.verified


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_repacked_in_place_fail_the_sync(model_folder: Path, transport: str) -> None:
    weights = weights_of(model_folder)
    (engine,) = engines(model_folder, 1)
    engine.worker = FakeRepackingWorker(engine)
    lane = lane_to(weights, [engine], transport=transport)
    change(weights, 1)
    with pytest.raises(VerificationError, match=rf"in {REPACKED} \(from {REPACKED}; 1 of 1 placements"):
        lane.sync(version=1)
    assert not engine.servable
    assert versions_held([engine]) == [None]
    lane.close()


def test_without_reading_back_they_are_served(model_folder: Path) -> None:
    # The control: counts and digests are equal, and the weights are not.
    weights = weights_of(model_folder)
    (engine,) = engines(model_folder, 1)
    engine.worker = FakeRepackingWorker(engine)
    lane = lane_to(weights, [engine], transport="inline", read_back="never")
    assert "digests equal" in lane.sync(version=1).replicas[0].verified
    assert engine.servable
    assert not held_equal(engine, weights)
    assert "read back: never" in str(lane.plan())
    lane.close()


def test_a_policy_that_does_not_exist_is_refused(model_folder: Path) -> None:
    with pytest.raises(UsageError, match="read_back='sometimes' is unknown"):
        lane_to(weights_of(model_folder), engines(model_folder, 1), read_back="sometimes")
