"""What is tried under every wrapper."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import tiny_models
import torch
from fsdp_wrappers import DEVICE
from peft_wrappers import ADAPTED, Adapted
from rank_export import lane_of, require_same, unsharded

from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    Wrap = Callable[[nn.Module], nn.Module]
    Make = Callable[[], nn.Module]

MODELS: dict[str, Make] = {
    "dense": tiny_models.dense,
    "tied": partial(tiny_models.dense, tied=True),
    "bf16": partial(tiny_models.dense, dtype=torch.bfloat16),
    "experts": tiny_models.experts,
    "buffers": tiny_models.with_buffers,
}


BUCKETS = (16 << 10, 1 << 10)
"""Bytes: small tensors together, and nearly every tensor alone."""


@cache
def full_values(make: Make) -> dict[str, Tensor]:
    return unsharded(tiny_models.disturb(make()))


@cache
def adapted_values(make: Make, adapted: Adapted, phase: Phase) -> dict[str, Tensor]:
    name = adapted.name or ("default" if phase is Phase.ADAPTER else None)
    return unsharded(tiny_models.disturb(adapted.wrap(make())), phase, name)


def exports_what_it_is(make: Make, wrap: Wrap, *, forward: bool = True) -> None:
    """Mode full: before and after a forward without gradients, which leaves some parameters gathered."""
    expected = full_values(make)
    wrapped = wrap(tiny_models.disturb(make()))
    for bucket_bytes in BUCKETS:
        with lane_of(wrapped, bucket_bytes=bucket_bytes) as lane:
            require_same(lane.sync(), expected)
            if forward:
                with torch.no_grad():
                    wrapped(input_ids=torch.arange(8, device=DEVICE).view(1, 8))
                require_same(lane.sync(), expected)


def exports_adapted(make: Make, wrap: Wrap, adapted: Adapted, phase: Phase) -> None:
    """Merged, base and adapter, equal to the same recipes over the model that nothing shards."""
    expected = adapted_values(make, adapted, phase)
    wrapped = wrap(tiny_models.disturb(adapted.wrap(make())))
    options = {"adapter": adapted.name} if adapted.name else {}
    with lane_of(wrapped, phase, bucket_bytes=2 << 10, **options) as lane:
        require_same(lane.sync(), expected)


FSDP1_ON_CPU_CANNOT_COMPUTE_OFFLOADED = "fsdp1 offload"
"""It pins memory for an accelerator at its first forward."""


def full_cases(
    wrappers: Mapping[str, Wrap], kinds: Mapping[str, Make] = MODELS
) -> dict[str, Callable[[], None]]:
    return {
        f"full / {name} / {wrapper}": partial(
            exports_what_it_is, make, wrap, forward=wrapper != FSDP1_ON_CPU_CANNOT_COMPUTE_OFFLOADED
        )
        for name, make in kinds.items()
        for wrapper, wrap in wrappers.items()
    }


def adapter_cases(
    wrappers: Mapping[str, Wrap], kinds: Mapping[str, Make], adapted: Mapping[str, Adapted] = ADAPTED
) -> dict[str, Callable[[], None]]:
    return {
        f"{phase.value} / {how} / {name} / {wrapper}": partial(exports_adapted, make, wrap, item, phase)
        for name, make in kinds.items()
        for how, item in adapted.items()
        for phase in item.phases
        for wrapper, wrap in wrappers.items()
    }
