"""The cases of two ranks with a GPU each, over NCCL; nothing but the device differs from `two_ranks`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

os.environ["FSDP_TEST_DEVICE"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # read where wrappers are made

import pytest
import tiny_models
import torch
from case_running import run
from fsdp_cases import MODELS, adapter_cases, full_cases
from fsdp_offloading import exported_over
from fsdp_special import ON_ANY_DEVICE
from fsdp_wrappers import DEVICE, WRAPPERS, fsdp2
from peft_wrappers import ADAPTED, lora
from rank_export import lane_of, require_same, unsharded

from weightlane.errors import ExportError
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

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


def a_shard_on_the_cpu_is_staged(staging: str, phase: Phase) -> None:
    """The user moved the model away; parts are brought back for the sync, and the model stays where it is."""
    make = tiny_models.dense if phase is Phase.FULL else adapted
    name = "default" if phase is Phase.ADAPTER else None
    expected = unsharded(tiny_models.disturb(make()), phase, name)
    wrapped = fsdp2(tiny_models.disturb(make())).cpu()
    with lane_of(wrapped, phase, staging=staging) as lane:
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


def adapted() -> nn.Module:
    return lora(tiny_models.dense())


def a_move_in_mid_sync_is_refused() -> None:
    """As a user offloads: `model.cpu()`, before the last bucket."""
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))
    with lane_of(wrapped) as lane, pytest.raises(ExportError, match="was moved, freed or replaced while its"):
        exported_over(lane, wrapped.cpu)


CASES: dict[str, Callable[[], None]] = {
    **ON_ANY_DEVICE,
    **{
        f"staging / {way} / {phase.value}": partial(a_shard_on_the_cpu_is_staged, way, phase)
        for way in ("parts", "shard")
        for phase in (Phase.FULL, Phase.MERGED, Phase.ADAPTER)
    },
    "a move in mid-sync": a_move_in_mid_sync_is_refused,
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
