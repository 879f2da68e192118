"""The cases of two ranks with a GPU each, over NCCL; nothing but the device differs from `two_ranks`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

os.environ["FSDP_TEST_DEVICE"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # read where wrappers are made

import tiny_models
import torch
from case_running import run
from fsdp_cases import MODELS, adapter_cases, full_cases
from fsdp_special import ON_ANY_DEVICE
from fsdp_wrappers import DEVICE, WRAPPERS, fsdp2
from peft_wrappers import ADAPTED
from rank_export import lane_of, require_same, unsharded

if TYPE_CHECKING:
    from collections.abc import Callable

UNDER = (
    "ddp",
    "fsdp1",
    "fsdp1 flat",
    "fsdp1 mixed",
    "fsdp2",
    "fsdp2 by columns",
    "fsdp2 offload",
    "fsdp2 mixed",
)


def a_shard_on_the_cpu_is_staged(staging: str) -> None:
    """The user moved the model away; parts are brought back for the sync, and the model stays where it is."""
    expected = unsharded(tiny_models.disturb(tiny_models.dense()))
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense())).cpu()
    with lane_of(wrapped, staging=staging) as lane:
        with lane.plugin.weightlane_export_params(lane.context) as stream:
            if staging == "shard":
                stream.onload()
            given = {}
            for bucket in stream:
                given.update((lane.context.tensors[number].name, tensor) for number, tensor in bucket)
            if staging == "shard":
                stream.offload()
        require_same(given, expected)
    assert all(tensor.device == DEVICE for tensor in given.values())
    assert all(parameter.device.type == "cpu" for parameter in wrapped.parameters())


CASES: dict[str, Callable[[], None]] = {
    **ON_ANY_DEVICE,
    **{f"staging / {way}": partial(a_shard_on_the_cpu_is_staged, way) for way in ("parts", "shard")},
    **full_cases({name: WRAPPERS[name] for name in UNDER}),
    **adapter_cases(
        {name: WRAPPERS[name] for name in ("fsdp1", "fsdp2", "fsdp2 offload")},
        {name: MODELS[name] for name in ("dense", "experts")},
        {"lora": ADAPTED["lora"]},
    ),
}

if __name__ == "__main__":
    assert torch.cuda.device_count() > 1
    run(CASES)
