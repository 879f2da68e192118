"""What a sharded export must do besides giving the right values."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from fsdp_wrappers import DEVICE, WRAPPERS, fsdp2
from living_bytes import LivingBytes
from peft_wrappers import lora
from rank_export import ERA, lane_of, require_same, unsharded
from torch import nn

from weightlane.contexts import ExportContext
from weightlane.errors import ExportError
from weightlane.types import Phase
from weightlane_fsdp import plugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from weightlane.testing.rank_export import RankExport


def step(wrapped: nn.Module) -> None:
    """One optimizer step, on other data on each rank."""
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.3)
    tokens = torch.arange(8, device=DEVICE).view(1, 8) + dist.get_rank()
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def local_parts(wrapped: nn.Module) -> dict[str, Tensor]:
    def local(tensor: Any) -> Tensor:
        found: Tensor = getattr(tensor, "_local_tensor", tensor)
        return found.detach().clone()

    return {name: local(tensor) for name, tensor in wrapped.named_parameters()}


def require_untouched(wrapped: nn.Module, before: dict[str, Tensor]) -> None:
    after = local_parts(wrapped)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def follows_training(wrapper: str) -> None:
    """After each step the export is what torch itself gathers, and other than before."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
    before: dict[str, Tensor] = {}
    with lane_of(wrapped) as lane:
        for _ in range(2):
            step(wrapped)
            exported = lane.sync()
            require_same(
                exported, get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
            )
            assert not any(torch.equal(exported[name], tensor) for name, tensor in before.items())
            before = exported


def exports_either_precision(wrapper: str) -> None:
    """The master weights, or what the forward computes with: the same cast."""
    expected = unsharded(tiny_models.disturb(tiny_models.dense()))
    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
    with lane_of(wrapped, precision="master") as lane:
        require_same(lane.sync(), expected)
    with torch.no_grad():
        wrapped(input_ids=torch.arange(8, device=DEVICE).view(1, 8))
    low = {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()}
    with lane_of(wrapped, precision="compute") as lane:
        require_same(lane.sync(), low)


def buffers_must_agree() -> None:
    """The router's bias moved apart: an error that is the same on both ranks, or rank 0's by choice."""
    wrapped = fsdp2(tiny_models.disturb(tiny_models.with_buffers()))
    name, buffer = next((name, item) for name, item in wrapped.named_buffers() if "correction" in name)
    mine = buffer.clone()
    buffer.add_(dist.get_rank())
    told: list[Any] = [None, None]
    with lane_of(wrapped) as lane:
        with pytest.raises(ExportError, match="other values on rank 1 than on rank 0") as caught:
            lane.sync()
        dist.all_gather_object(told, str(caught.value))
    assert told[0] == told[1]
    assert name in told[0]
    with lane_of(wrapped, buffers="rank0") as lane:
        exported = lane.sync()
    assert torch.equal(exported[name], mine)
    assert torch.equal(buffer, mine + dist.get_rank()), "the trainer's own buffer was written"


def parameters_outside_of_units_must_agree() -> None:
    wrapped: Any = fsdp2(tiny_models.disturb(tiny_models.dense()), root=False)
    with torch.no_grad():
        wrapped.lm_head.weight.mul_(1 + dist.get_rank())
    with lane_of(wrapped) as lane, pytest.raises(ExportError, match=r"parameter lm_head\.weight has other"):
        lane.sync()


def only_serving_ranks_keep_anything() -> None:
    expected = unsharded(tiny_models.disturb(tiny_models.dense()))
    for bucket_bytes in (16 << 10, 1 << 10):
        wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))
        with lane_of(wrapped, serving=(1,), bucket_bytes=bucket_bytes) as lane:
            exported = lane.sync()
        require_same(exported, expected if dist.get_rank() == 1 else {})


def describing_is_no_collective(wrapper: str) -> None:
    """Rank 0 describes alone; a collective would wait for rank 1."""
    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
    if dist.get_rank() == 0:
        export = ExportContext(ERA, wrapped, Phase.FULL, 0, 2, {})
        began = time.monotonic()
        manifest = plugin.weightlane_describe_export(export)
        assert time.monotonic() - began < 10
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        expected = tiny_models.dense().state_dict()
        assert shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    dist.barrier()


def merged_values_do_not_go_stale() -> None:
    """Kept to after the next step, and abandoned half-way: what was given stays, the trainer's own too."""
    expected = unsharded(tiny_models.disturb(lora(tiny_models.dense())), Phase.MERGED)
    wrapped = fsdp2(tiny_models.disturb(lora(tiny_models.dense())))
    before = local_parts(wrapped)
    with lane_of(wrapped, Phase.MERGED, bucket_bytes=2 << 10) as lane:
        exported = lane.sync()
        require_untouched(wrapped, before)
        with plugin.weightlane_export_params(lane.context) as stream:
            for _ in zip(range(3), stream, strict=False):
                pass
        require_untouched(wrapped, before)
        step(wrapped)
        require_same(exported, expected)
        again = lane.sync()
    changed = [name for name, tensor in again.items() if not torch.equal(tensor, expected[name])]
    assert any("q_proj" in name for name in changed)
    after = local_parts(wrapped)
    frozen = [name for name in before if "lora_" not in name]
    assert frozen
    assert all(torch.equal(after[name], before[name]) for name in frozen)


def a_merge_context_does_go_stale() -> None:
    """The defect itself: a state dict made inside a merge context is the unmerged base after it."""
    wrapped: Any = fsdp2(tiny_models.disturb(lora(tiny_models.dense())))
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    base = wrapped.state_dict()[name].full_tensor()
    backup = {key: tensor.clone() for key, tensor in local_parts(wrapped).items()}
    wrapped.merge_adapter()
    held = wrapped.state_dict()[name]
    inside = held.full_tensor()
    wrapped.unmerge_adapter()
    with torch.no_grad():  # a restore from a backup, so that it is exact
        for key, parameter in wrapped.named_parameters():
            parameter._local_tensor.copy_(backup[key])
    assert not torch.allclose(inside, base, atol=1e-2)
    assert torch.equal(held.full_tensor(), base)


def memory_stays_within_two_buckets() -> None:
    """Above the shard, and beside the largest tensor; nothing of it is left afterwards."""
    bucket_bytes = 8 << 10
    for wrapper in ("fsdp2", "fsdp2 by columns", "fsdp1 flat"):
        wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
        with lane_of(wrapped, bucket_bytes=bucket_bytes) as lane:
            largest = max(spec.nbytes for spec in lane.context.manifest.tensors)
            allowed = 2 * bucket_bytes + largest + 1024
            with LivingBytes(allowed) as living, plugin.weightlane_export_params(lane.context) as stream:
                for bucket in stream:
                    assert bucket
                    del bucket
        assert bucket_bytes < living.peak <= allowed, (wrapper, living.peak, allowed)
        assert living.now < 1024, living.now


def buckets_that_are_kept_take_more() -> None:
    """The bound of `memory` is one that an export can miss."""
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))
    with lane_of(wrapped, bucket_bytes=8 << 10) as lane:
        largest = max(spec.nbytes for spec in lane.manifest.tensors)
        allowed = 2 * (8 << 10) + largest + 1024
        with LivingBytes(allowed) as living:
            kept = lane.sync()
    assert kept
    assert living.peak > allowed


def without_the_check_buffers_differ_in_silence() -> None:
    """The rule of `buffers must agree`, undone: each rank would send its own."""
    from weightlane_fsdp import stream

    wrapped = fsdp2(tiny_models.disturb(tiny_models.with_buffers()))
    name, buffer = next((name, item) for name, item in wrapped.named_buffers() if "correction" in name)
    buffer.add_(dist.get_rank())
    told: list[Any] = [None, None]
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped) as lane:
        patch.setattr(stream, "require_equal", lambda items, collectives: None)
        dist.all_gather_object(told, lane.sync()[name].cpu())
    assert not torch.equal(told[0], told[1])


def parameters_as_they_stand_are_no_export() -> None:
    """What is exported instead of what modules hold: gathered low-precision values, slices without shape."""
    newer = WRAPPERS["fsdp2 mixed"](tiny_models.disturb(tiny_models.dense()))
    with torch.no_grad():
        newer(input_ids=torch.arange(8, device=DEVICE).view(1, 8))
    assert any(parameter.dtype == torch.bfloat16 for parameter in newer.parameters())
    older = WRAPPERS["fsdp1"](tiny_models.disturb(tiny_models.dense()))
    assert all(parameter.ndim == 1 for parameter in older.parameters())
    flat = WRAPPERS["fsdp1 flat"](tiny_models.disturb(tiny_models.dense()))
    assert all(name.endswith("_flat_param") for name, _ in flat.named_parameters())


def a_step_in_mid_sync_is_refused(wrapper: str) -> None:
    """Some buckets would hold the weights before it and some those after it."""
    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))

    def sync_and_step(export: RankExport) -> None:
        with export.plugin.weightlane_export_params(export.context) as stream:
            for number, _ in enumerate(stream):
                if number == 1:
                    step(wrapped)

    with lane_of(wrapped) as lane, pytest.raises(ExportError, match="was changed while its version was"):
        sync_and_step(lane)


def a_rank_that_never_comes_ends_the_wait() -> None:
    """By the error that another rank told, and by the bound where nobody told any."""

    class OtherRankFailedError(Exception):
        pass

    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.5:
            raise OtherRankFailedError

    lane = lane_of(wrapped, check=check)
    bounded = lane_of(wrapped, seconds=2.0)
    if dist.get_rank() == 0:
        with pytest.raises(OtherRankFailedError):
            lane.sync()
        # gloo has the same bound, and may be the first to tell.
        with pytest.raises((ExportError, RuntimeError)):
            bounded.sync()
        assert time.monotonic() - began < 10
    dist.barrier()


def a_model_that_was_changed_is_refused() -> None:
    wrapped: Any = fsdp2(tiny_models.disturb(tiny_models.dense()), root=False)
    with lane_of(wrapped) as lane:
        wrapped.lm_head.weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(ExportError, match=r"lm_head.weight is float32\[3, 3\] on rank") as caught:
            lane.sync()
    assert "connect again" in str(caught.value)
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()), root=False)
    with lane_of(wrapped) as lane:
        wrapped.model.scale = nn.Linear(2, 2)
        with pytest.raises(ExportError, match=r"model.scale.weight and 1 more tensors are on rank \d, but"):
            lane.sync()


def partial_sums_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(ExportError, match="weight has placement"):
        lane_of(model)


SPECIAL: dict[str, Callable[[], None]] = {
    **{
        f"follows training / {name}": partial(follows_training, name)
        for name in ("fsdp1", "fsdp1 flat", "fsdp2", "fsdp2 kept", "ddp")
    },
    **{
        f"precision / {name}": partial(exports_either_precision, name)
        for name in ("fsdp1 mixed", "fsdp2 mixed")
    },
    **{
        f"describing / {name}": partial(describing_is_no_collective, name)
        for name in ("fsdp1", "fsdp1 flat", "fsdp2")
    },
    "buffers must agree": buffers_must_agree,
    "parameters outside of units must agree": parameters_outside_of_units_must_agree,
    "only serving ranks keep anything": only_serving_ranks_keep_anything,
    "merged values do not go stale": merged_values_do_not_go_stale,
    "a merge context does go stale": a_merge_context_does_go_stale,
    "memory": memory_stays_within_two_buckets,
    "buckets that are kept": buckets_that_are_kept_take_more,
    "without the check": without_the_check_buffers_differ_in_silence,
    "parameters as they stand": parameters_as_they_stand_are_no_export,
    **{
        f"a step in mid-sync / {name}": partial(a_step_in_mid_sync_is_refused, name)
        for name in ("ddp", "fsdp1", "fsdp1 flat", "fsdp2")
    },
    "a rank that never comes": a_rank_that_never_comes_ends_the_wait,
    "a changed model": a_model_that_was_changed_is_refused,
    "partial sums": partial_sums_are_refused,
}

ON_ANY_DEVICE = {
    name: SPECIAL[name]
    for name in (
        "follows training / fsdp2",
        "buffers must agree",
        "only serving ranks keep anything",
        "merged values do not go stale",
    )
}
