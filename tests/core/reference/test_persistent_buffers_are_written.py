"""Buffers that a checkpoint holds are written like parameters: in place, in the model's own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightlane.reference.engine import ReferenceEngine
from weightlane.reference.worker import ReferenceWorker

NAME = "model.norm.scale_ema"


@pytest.fixture
def worker(untied_folder: str) -> ReferenceWorker:
    engine = ReferenceEngine(untied_folder)
    engine.model.model.norm.register_buffer("scale_ema", torch.zeros(4))
    return ReferenceWorker(engine)


def held(worker: ReferenceWorker) -> Any:
    return worker._live_tensors()[NAME]


@pytest.mark.requirement("R69", part="reference engine")
@pytest.mark.requirement("R71", part="dtype, reference engine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_buffer_is_copied_into_and_cast(worker: ReferenceWorker, dtype: torch.dtype) -> None:
    assert NAME in {tensor.name for tensor in worker.describe().expected}
    address = held(worker).data_ptr()
    worker.begin(1)
    worker.load_weights([(NAME, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype))])
    assert held(worker).data_ptr() == address
    assert held(worker).dtype == torch.float32
    assert held(worker).tolist() == [1.0, 2.0, 3.0, 4.0]
