"""Two reports about dtypes, as data: what travels has the receiver's dtype, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.buckets import lay_out_buckets
from weightlane.manifest import Manifest, TensorSpec
from weightlane.messages import WireTensor
from weightlane.packing import pack_bucket, torch_dtype, unpack_bucket
from weightlane.receiver import LiveTensor, WorkerDescription
from weightlane.types import Phase
from weightlane_vllm.names import map_names

DATA = Path(__file__).parents[1] / "core" / "data" / "plan_cases.json"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads(DATA.read_text())}


def arrived(name: str, value: float, dtype: str, held: str) -> torch.Tensor:
    """A one-element tensor on its way to a receiver that holds it as `held`."""
    worker = WorkerDescription(0, 1, "here", 1, "a", live=(LiveTensor(name, (1,), held),))
    (entry,) = map_names(Manifest(Phase.FULL, 1, (TensorSpec(name, (1,), dtype),)), worker)
    wires = [WireTensor(entry.wire, (1,), entry.dtype)]
    (layout,) = lay_out_buckets(wires)
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
    pack_bucket(bucket, layout, wires, [(0, torch.tensor([value], dtype=torch_dtype(dtype)))])
    ((_, tensor),) = unpack_bucket(bucket, layout, wires)
    return tensor


def test_case_te_05_a_float32_tensor_for_a_bfloat16_receiver() -> None:
    case = CASES["te-05"]
    given = case["input"]
    tensor = arrived("q_proj.weight", 1.5, given["dtype"], given["receiver_dtype"])
    assert tensor.dtype == torch_dtype(case["expected"]["dtype"])


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_case_te_06_a_float32_bias_among_bfloat16_weights_is_not_rounded(held: str) -> None:
    case = CASES["te-06"]
    given, expected = case["input"], case["expected"]
    tensor = arrived(given["name"], given["value"], given["dtype"], held)
    # The control is a receiver that holds it in bfloat16: it is rounded there, and nowhere else.
    assert tensor.item() == (expected["value"] if held == "float32" else expected["bf16_would_give"])
    assert tensor.dtype == torch_dtype(held)
