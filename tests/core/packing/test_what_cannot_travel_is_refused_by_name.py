"""What is not whole, dense and of a planned dtype is refused with its name, before a byte is written."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from weightlane.buckets import lay_out_buckets
from weightlane.contexts import ExportContext
from weightlane.errors import ExportError, ProtocolError
from weightlane.manifest import DTYPE_BYTES, RankManifest, TensorSpec, merge_rank_manifests
from weightlane.messages import WireTensor
from weightlane.packing import memory_of, pack_bucket, torch_dtype
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.modules import named_tensors
from weightlane.torch_trainer.plugin import weightlane_register_backends
from weightlane.transports.sink import cast_for_wire
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = ["int4", "uint4", "int1", "uint7", "quint8", "qint8", "qint32", "quint4x2", "bits8", "no_such"]


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to remove them; until then a model may hold them
        return torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)


def a_shard() -> Tensor:
    class FakeShard(Tensor):
        def full_tensor(self) -> Tensor:
            return self

    return torch.zeros(3).as_subclass(FakeShard)


NOT_PLAIN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.zeros(3, device="meta"), "a tensor on the meta device"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), "layout torch.sparse_coo"),
    "quantised": (quantised, "qint8"),
    "shard": (a_shard, "a FakeShard"),
}


def pack(wire: WireTensor, tensor: Tensor) -> Tensor:
    (layout,) = lay_out_buckets([wire])
    bucket = torch.full((layout.nbytes,), 7, dtype=torch.uint8)
    try:
        pack_bucket(bucket, layout, [wire], [(0, tensor)])
    except ExportError:
        assert bool((bucket == 7).all())
        raise
    return bucket


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_is_refused_when_packed_and_when_described(kind: str) -> None:
    make, told = NOT_PLAIN[kind]
    with pytest.raises(ExportError, match=rf"layers\.0\.w is .*{told}"):
        pack(WireTensor("layers.0.w", (3,), "float32"), make())
    with pytest.raises(ExportError, match=rf"layers\.0\.w is .*{told}"):
        named_tensors({"layers.0.w": make()})


@pytest.mark.parametrize(
    ("held", "planned"),
    [
        (torch.float32, "int8"),
        (torch.int64, "int32"),
        (torch.complex64, "float32"),
        (torch.float32, "bool"),
        (torch.float32, "float8_e4m3fn"),
        (torch.uint8, "float32"),
    ],
)
def test_a_cast_that_changes_values_is_refused(held: torch.dtype, planned: str) -> None:
    with pytest.raises(ExportError, match=rf"w has dtype .* now, but travels as {planned}"):
        pack(WireTensor("w", (3,), planned), torch.zeros(3, dtype=held))


def test_copying_without_that_check_would_change_values_in_silence() -> None:
    # The control of the test above.
    target = torch.zeros(2, dtype=torch.int8)
    target.copy_(torch.tensor([1.5, 300.0]))
    assert target.tolist() == [1, 44]


@pytest.mark.parametrize("dtype", NEVER)
def test_a_dtype_that_may_not_travel_is_named(dtype: str) -> None:
    assert dtype not in DTYPE_BYTES
    part = RankManifest(
        rank=0, world_size=1, phase=Phase.FULL, tensors=(TensorSpec("w", (2,), dtype),), replicated=True
    )
    manifest, (problem,) = merge_rank_manifests([part])
    assert manifest is None
    assert f"w: rank 0 holds dtype {dtype}, which cannot travel" in str(problem)
    with pytest.raises(ProtocolError, match=f"'{dtype}' cannot be read here"):
        torch_dtype(dtype)


def test_a_dtype_that_this_torch_lacks_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(ProtocolError, match=r"torch .* of this process does not know it"):
        torch_dtype("float8_e8m0fnu")


@pytest.mark.parametrize("name", ["conjugated", "negated"])
def test_a_lazy_view_travels_as_what_it_reads(name: str) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    view = {"conjugated": base.conj(), "negated": torch._neg_view(base)}[name]
    wire = WireTensor("w", (2,), "complex64")
    # The symptom: its memory still holds the base's values, and contiguous() does not change that.
    with pytest.raises(ValueError, match="conjugated or negated"):
        memory_of(view.contiguous())
    ready = cast_for_wire(view, wire)
    assert bytes(memory_of(ready)) == bytes(pack(wire, view)[:16].numpy())
    assert ready.tolist() == view.tolist() != base.tolist()


def test_a_lazy_view_is_no_alias_of_its_base() -> None:
    # Same storage, shape and strides, other values: an alias may stay unsent.
    base = torch.tensor([1 + 2j, 3 - 4j])
    (descriptor,) = weightlane_register_backends()
    context = ExportContext(
        descriptor=descriptor,
        model={"a": base, "tied": base, "b": base.conj(), "c": torch._neg_view(base)},
        phase=Phase.FULL,
        rank=0,
        world_size=1,
        options={},
    )
    assert describe(context).aliases == {"tied": "a"}
