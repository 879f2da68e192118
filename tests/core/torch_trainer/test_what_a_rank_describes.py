"""What a plain torch model exports: checkpoint names, whole tensors, aliases; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from partitioned_ranks import as_bytes, changed_since_connect, export_context, some_of_every_dtype, stream_of
from torch import nn

from weightlane.buckets import lay_out_buckets
from weightlane.errors import ExportError
from weightlane.manifest import Manifest, merge_rank_manifests
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.modules import named_tensors


class FakeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("not_saved", torch.zeros(2), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.embed(x)))


NAMES = [
    "embed.weight",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "head.weight",
]


def merged(model: Any, **options: Any) -> Manifest:
    manifest, problems = merge_rank_manifests([describe(export_context(model, **options))])
    assert manifest is not None, problems
    return manifest


@pytest.mark.requirement("R17")
def test_parameters_and_persistent_buffers_by_checkpoint_name() -> None:
    model = FakeModel()
    part = describe(export_context(model))
    assert [spec.name for spec in part.tensors] == NAMES == list(model.state_dict())
    by_name = {spec.name: spec for spec in part.tensors}
    assert (by_name["norm.num_batches_tracked"].shape, by_name["norm.num_batches_tracked"].dtype) == (
        (),
        "int64",
    )
    assert (part.replicated, part.collective, part.device) == (True, False, "cpu")


def test_tied_tensors_are_aliases_of_the_first() -> None:
    assert describe(export_context(FakeModel())).aliases == {"head.weight": "embed.weight"}


def test_views_that_only_share_storage_are_not_aliases() -> None:
    base = torch.zeros(4, 4)
    tensors = {
        "whole": base,
        "row": base[0],
        "transposed": base.t(),
        "as int": base.view(torch.int32),
        "same": base[:],
        "empty": torch.zeros(0),
        "empty too": torch.zeros(0),
    }
    assert describe(export_context(tensors)).aliases == {"same": "whole"}


def test_tensors_are_live_not_copies() -> None:
    model = FakeModel()
    held = named_tensors(model)
    assert held["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert not held["embed.weight"].requires_grad


@pytest.mark.requirement("R17")
def test_wrappers_are_taken_off() -> None:
    compiled = torch.compile(FakeModel(), backend="eager")
    assert list(named_tensors(compiled)) == NAMES
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(FakeModel())
        assert list(named_tensors(wrapped)) == NAMES
        assert list(named_tensors(nn.parallel.DistributedDataParallel(compiled))) == NAMES
    finally:
        dist.destroy_process_group()


def test_a_models_own_child_called_module_is_not_a_wrapper() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2, bias=False)
    assert list(named_tensors(model)) == ["module.weight"]


def test_a_rank_may_hold_nothing() -> None:
    part = describe(export_context(None, rank=1, world_size=2, placement="partitioned"))
    assert (part.tensors, part.replicated, part.collective) == ((), False, True)


class FullyShardedDataParallel(nn.Module):
    """Stands in for FSDP 1, whose state dict would be a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a collective was started")


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}

    def set_extra_state(self, state: Any) -> None: ...


class FakeShard(torch.Tensor):
    """Has what DTensor has."""

    def full_tensor(self) -> Any:
        raise AssertionError("a collective was started")


UNEXPORTABLE: dict[str, tuple[Any, str]] = {
    "meta": (nn.Linear(2, 2, device="meta"), "weight is a tensor on the meta device"),
    "extra state": (WithExtraState(2, 2), "_extra_state is a dict"),
    "number": ({"step": 3}, "step is a int"),
    "shard": ({"w": torch.zeros(2).as_subclass(FakeShard)}, "w is a FakeShard"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, "w is a tensor of layout torch.sparse_coo"),
    "fsdp 1": (nn.Sequential(FullyShardedDataParallel()), "0 is wrapped by FullyShardedDataParallel"),
    "list": ([torch.zeros(2)], "of type list"),
}


@pytest.mark.parametrize("kind", UNEXPORTABLE)
def test_what_is_not_a_whole_tensor_is_refused_by_name(kind: str) -> None:
    model, told = UNEXPORTABLE[kind]
    with pytest.raises(ExportError) as caught:
        describe(export_context(model))
    assert told in str(caught.value)


def test_a_real_dtensor_is_refused() -> None:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(4, 2), DeviceMesh("cpu", [0]))
        with pytest.raises(ExportError, match="w is a DTensor"):
            describe(export_context({"w": sharded}))
    finally:
        dist.destroy_process_group()


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ExportError, match="one of replicated, partitioned"):
        describe(export_context(None, placement="sharded"))


# -- streaming on one rank ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["replicated", "partitioned"])
def test_one_rank_streams_its_own_live_tensors_in_plan_order(placement: str) -> None:
    model = some_of_every_dtype(0)
    manifest = merged(model, placement=placement)
    stream = stream_of(export_context(model, placement=placement), manifest)
    for seed in (0, 1):
        model.update(some_of_every_dtype(seed))
        given = [item for bucket in stream for item in bucket]
        assert [number for number, _ in given] == list(range(len(model)))
        assert [as_bytes(tensor) for _, tensor in given] == [as_bytes(tensor) for tensor in model.values()]
        for (_, tensor), held in zip(given, model.values(), strict=True):
            assert tensor.data_ptr() == held.data_ptr()


def test_dropped_tensors_are_not_yielded_and_numbers_follow_the_plan() -> None:
    model = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.ones(4)}
    stream = stream_of(export_context(model), merged(model), drop=("a",))
    given = [(number, tensor.numel()) for bucket in stream for number, tensor in bucket]
    assert given == [(0, 3), (1, 4)]


def test_nothing_to_send_is_one_empty_bucket() -> None:
    assert list(stream_of(export_context({}), merged({}))) == [[]]
    assert len(lay_out_buckets(())) == 1


@pytest.mark.parametrize(
    ("change", "now"),
    [
        ({"w": torch.zeros(3)}, "w is float32[3] on rank 0, but was float32[2]"),
        ({"w": torch.zeros(2, dtype=torch.float16)}, "w is float16[2] on rank 0"),
        ({"w": None}, "w is gone"),
    ],
)
def test_a_model_changed_since_connect_is_refused_by_name(change: dict[str, Any], now: str) -> None:
    model = {"v": torch.zeros(1), "w": torch.zeros(2)}
    manifest = merged(model)
    assert changed_since_connect(model, manifest) == ""
    model = {name: tensor for name, tensor in (model | change).items() if tensor is not None}
    assert now in changed_since_connect(model, manifest)


def test_a_tensor_added_since_connect_is_not_sent() -> None:
    model = {"w": torch.zeros(2)}
    manifest = merged(model)
    model["new"] = torch.zeros(1)
    assert [len(bucket) for bucket in stream_of(export_context(model), manifest)] == [1]
