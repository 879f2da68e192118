"""When a sharded trainer's parts are brought to the device of their group, and when they may leave it.

Two devices are told apart here as `cpu` and `cpu:0`: torch takes them for different ones, so that a shard on
the one is staged for a group on the other. What a copy between real devices does is seen in `two_gpus`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from fsdp_special import step
from fsdp_wrappers import WRAPPERS, fsdp2
from peft_wrappers import lora
from rank_export import lane_of, require_same, unsharded
from torch.distributed.fsdp import FullyShardedDataParallel

from weightlane.contexts import TrainerLifecycleContext
from weightlane.errors import ExportError
from weightlane.hook_errors import GuardedStream, HookSite
from weightlane.types import Phase
from weightlane_fsdp import export as fsdp_export
from weightlane_fsdp import plugin
from weightlane_fsdp.eras import ERAS
from weightlane_fsdp.gathering import Gathering
from weightlane_fsdp.stream import FsdpStream, _Making

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from weightlane.program import TrainerLifecycle
    from weightlane.testing.rank_export import RankExport
    from weightlane_fsdp.held import Held

FAKE_GPU = torch.device("cpu", 0)
SITE = HookSite("fsdp", "weightlane-fsdp", "", "weightlane_export_params")


def moved(wrapped: nn.Module) -> None:
    """To another device and no further: every shard gets other memory, as trainers do it between steps."""
    units = [unit for unit in wrapped.modules() if isinstance(unit, FullyShardedDataParallel)]
    for unit in units:
        if unit._handle is not None:
            flat: Any = unit._handle.flat_param
            flat.data = flat.data.clone()
            flat._local_shard = flat.data
    if not units:
        wrapped._apply(torch.clone)


def freed(wrapped: nn.Module) -> None:
    for parameter in wrapped.parameters():
        getattr(parameter, "_local_tensor", parameter).untyped_storage().resize_(0)


def exported_over(lane: RankExport, event: Callable[[], None]) -> None:
    """`event` falls after the second bucket, on this rank."""
    with lane.plugin.weightlane_export_params(lane.context) as stream:
        for number, _ in enumerate(stream):
            if number == 1:
                event()


def a_move_in_mid_sync_is_refused(wrapper: str, event: Callable[[nn.Module], None] = moved) -> None:
    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
    with lane_of(wrapped) as lane, pytest.raises(ExportError, match="was moved, freed or replaced while its"):
        exported_over(lane, partial(event, wrapped))


def after_the_last_bucket_it_may_be_moved(wrapper: str) -> None:
    expected = unsharded(tiny_models.disturb(tiny_models.dense()))
    wrapped = WRAPPERS[wrapper](tiny_models.disturb(tiny_models.dense()))
    with lane_of(wrapped) as lane:
        for _ in range(2):
            require_same(lane.sync(), expected)
            moved(wrapped)


def a_freed_shard_is_named() -> None:
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))
    freed(wrapped)
    with pytest.raises(ExportError, match=r"memory of model\.embed_tokens\.weight was freed"):
        lane_of(wrapped)


def without_the_check_a_move_is_silent() -> None:
    """The trainer moves and steps in mid-sync, and what it holds now is not what was sent as its version."""
    wrapped = fsdp2(tiny_models.disturb(tiny_models.dense()))

    def move_and_step() -> None:
        moved(wrapped)
        step(wrapped)

    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped) as lane:
        patch.setattr(_Making, "require_unchanged", lambda self, items: None)
        exported_over(lane, move_and_step)


# -- staging ------------------------------------------------------------------------------------------------


def planned(lane: RankExport, **options: str) -> TrainerLifecycle:
    context = TrainerLifecycleContext(ERAS[0], lane.manifest, options)
    return plugin.weightlane_plan_lifecycle(context)


class Reads:
    """Which parts were read, from a staged copy (True) or from the live shard."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, bool] = {}
        reads, healthy = self, Gathering._part

        def part(self: Gathering, held: Held) -> Tensor:
            reads.seen[held.source.key] = held.source.key in self._staged
            return healthy(self, held)

        patch.setattr(Gathering, "_part", part)
        patch.setattr(fsdp_export, "_device", lambda held: FAKE_GPU)


def exports_without_staging(make: Callable[[], nn.Module]) -> None:
    """No copy is made ahead: a part is read for the bucket that needs it, or the tensor after that."""
    expected = unsharded(tiny_models.disturb(make()))
    wrapped = fsdp2(tiny_models.disturb(make()))
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped, bucket_bytes=2 << 10) as lane:
        lifecycle = planned(lane)
        assert (lifecycle.onload, lifecycle.offload) == ("", "")
        reads = Reads(patch)
        names = [wire.name for wire in lane.context.tensors]
        given: dict[str, Tensor] = {}
        with FsdpStream(lane.context) as stream:
            assert not reads.seen, "describing and entering read nothing"
            for bucket in stream:
                given.update((names[number], tensor) for number, tensor in bucket)
                assert len(reads.seen) <= len(given) + 1
                assert not stream._staged  # type: ignore[attr-defined]
        assert not any(reads.seen.values())
        require_same(given, expected)


def stages_what_an_adapter_is_merged_of(phase: Phase) -> None:
    """Base weights and matrices are on the group's device before the first of them is added to another."""
    name = "default" if phase is Phase.ADAPTER else None
    expected = unsharded(tiny_models.disturb(lora(tiny_models.dense())), phase, name)
    wrapped = fsdp2(tiny_models.disturb(lora(tiny_models.dense())))
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped, phase, staging="shard") as lane:
        lifecycle = planned(lane, staging="shard")
        assert lifecycle.onload
        assert lifecycle.offload
        reads = Reads(patch)
        with guarded(lane) as (stream, inner):
            stream.onload()
            used = {held.source.key for held in inner._entered().used}
            assert set(inner._staged) == used
            assert any("lora_A" in key for key in used)
            assert any("base_layer" in key for key in used) == (phase is Phase.MERGED)
            given = buckets_of(lane, iter(stream))
            assert set(inner._staged) == used, "nothing left before the stream was at its end"
            stream.offload()
            assert not inner._staged
        assert all(reads.seen.values())
        require_same(given, expected)


def without_onload_parts_are_read_where_they_lie() -> None:
    """The rule undone: what `stages ...` sees is the staging's own doing."""
    wrapped = fsdp2(tiny_models.disturb(lora(tiny_models.dense())))
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped, Phase.MERGED, staging="shard") as lane:
        reads = Reads(patch)
        with guarded(lane) as (stream, _):
            buckets_of(lane, iter(stream))
        assert reads.seen
        assert not any(reads.seen.values())


def an_offload_in_mid_sync_ends_it(*, ruled: bool = True) -> None:
    """An error at the next bucket; without the rule, what was staged is read from the shard in silence."""
    wrapped = fsdp2(tiny_models.disturb(lora(tiny_models.dense())))
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped, Phase.MERGED, staging="shard") as lane:
        reads = Reads(patch)
        with guarded(lane) as (stream, _):
            stream.onload()
            buckets = iter(stream)
            next(buckets)
            assert all(reads.seen.values())
            stream.offload()
            if ruled:
                with pytest.raises(
                    ExportError, match=r"of plugin fsdp .*after its trainer had been offloaded"
                ):
                    next(buckets)
                return
            stream._memory.offloaded = False
            buckets_of(lane, buckets)
        assert not all(reads.seen.values())


class guarded:  # noqa: N801 - a context
    """A stream as core hands it out, entered, and the plugin's own within it."""

    def __init__(self, lane: RankExport) -> None:
        self._inner = FsdpStream(lane.context)
        self._stream = GuardedStream(self._inner, SITE)

    def __enter__(self) -> tuple[GuardedStream, FsdpStream]:
        return self._stream.__enter__(), self._inner

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(*exc)  # type: ignore[arg-type]


def buckets_of(lane: RankExport, buckets: Iterator[Any]) -> dict[str, Tensor]:
    names = [wire.name for wire in lane.context.tensors]
    return {names[number]: tensor for bucket in buckets for number, tensor in bucket}


OFFLOADING: dict[str, Callable[[], None]] = {
    **{
        f"a move in mid-sync / {name}": partial(a_move_in_mid_sync_is_refused, name)
        for name in ("plain", "ddp", "fsdp1", "fsdp1 flat", "fsdp2", "fsdp2 layers only")
    },
    "a freed shard in mid-sync": partial(a_move_in_mid_sync_is_refused, "fsdp2", freed),
    **{
        f"moved after the last bucket / {name}": partial(after_the_last_bucket_it_may_be_moved, name)
        for name in ("fsdp1", "fsdp1 flat", "fsdp2")
    },
    "a freed shard": a_freed_shard_is_named,
    "without the check a move is silent": without_the_check_a_move_is_silent,
    "an offload in mid-sync": an_offload_in_mid_sync_ends_it,
    "an offload in mid-sync, without the rule": partial(an_offload_in_mid_sync_ends_it, ruled=False),
}

STAGING: dict[str, Callable[[], None]] = {
    "no staging without an adapter": partial(exports_without_staging, tiny_models.dense),
    "no staging without an adapter / experts": partial(exports_without_staging, tiny_models.experts),
    **{
        f"staging with an adapter / {phase.value}": partial(stages_what_an_adapter_is_merged_of, phase)
        for phase in (Phase.MERGED, Phase.ADAPTER)
    },
    "staging with an adapter, undone": without_onload_parts_are_read_where_they_lie,
}
