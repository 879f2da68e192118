"""What a loader may do to a tensor on its way: each is followed to the element, as an oracle finds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    Trace = Callable[..., Any]  # of conftest.Traced
    Weights = dict[str, Tensor]


def model(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Module()
    made.w = nn.Parameter(torch.randn(shape).to(dtype))
    return made


A, B = torch.empty(4, 6), torch.empty(4, 6)

REARRANGED: dict[str, tuple[tuple[int, ...], Callable[[Weights], Tensor]]] = {
    "as it is": ((4, 6), lambda w: w["a"]),
    "view": ((24,), lambda w: w["a"].view(24)),
    "reshape": ((2, 12), lambda w: w["a"].reshape(2, 12)),
    "narrow": ((4, 2), lambda w: w["a"].narrow(1, 3, 2)),
    "slice with a step": ((2, 3), lambda w: w["a"][1::2, ::2]),
    "t": ((6, 4), lambda w: w["a"].t()),
    "permute": ((3, 4, 2), lambda w: w["a"].view(4, 2, 3).permute(2, 0, 1)),
    "t, contiguous, view": ((24,), lambda w: w["a"].t().contiguous().view(24)),
    "t, clone, flatten": ((24,), lambda w: w["a"].t().clone().flatten()),
    "slice, clone, unflatten": ((2, 2, 3), lambda w: w["a"][:, :3].clone().view(2, 2, 3)),
    "t, contiguous, slice, t": ((4, 2), lambda w: w["a"].t().contiguous()[1:3].t()),
    "reshape of t": ((3, 8), lambda w: w["a"].t().reshape(3, 8)),
    "chunk": ((2, 6), lambda w: w["a"].chunk(2)[1]),
    "split and unbind": ((2,), lambda w: w["a"].split(2, dim=1)[2].unbind(0)[3]),
    "squeeze": ((6, 4), lambda w: w["a"].unsqueeze(0).transpose(1, 2).squeeze(0)),
    "expand": ((2, 4, 6), lambda w: w["a"].expand(2, 4, 6)),
    "one row into all": ((4, 6), lambda w: w["a"][1]),
    "cat": ((8, 6), lambda w: torch.cat([w["a"], w["b"]])),
    "cat of t": ((6, 8), lambda w: torch.cat([w["a"].t(), w["b"].t()], dim=1)),
    "stack": ((4, 2, 6), lambda w: torch.stack([w["a"], w["b"]], dim=1)),
    "cat, t, contiguous, view": ((48,), lambda w: torch.cat([w["a"], w["b"]]).t().contiguous().view(48)),
    "flip": ((4, 6), lambda w: w["a"].flip(0)),
    "flip of t, as_strided": ((2, 2), lambda w: w["a"].t().flip(0).as_strided((2, 2), (1, 6))),
    "flip of t, by its layout": (
        (4, 6),
        lambda w: w["a"] if w["a"].t().flip(0).is_contiguous() else w["a"].flip(0),
    ),
    "index of expand, as_strided": (
        (3,),
        lambda w: w["a"][0].expand(2, 6).t()[[5, 0]].as_strided((3,), (1,)),
    ),
    "roll": ((4, 6), lambda w: torch.roll(w["a"], 1, dims=1)),
    "repeat": ((8, 6), lambda w: w["a"].repeat(2, 1)),
    "repeat_interleave": ((8, 6), lambda w: w["a"].repeat_interleave(2, dim=0)),
    "index_select": ((3, 6), lambda w: w["a"].index_select(0, torch.tensor([2, 0, 3]))),
    "fancy index": ((2,), lambda w: w["a"][torch.tensor([2, 0]), torch.tensor([5, 1])]),
    "mask": ((2, 6), lambda w: w["a"][torch.tensor([True, False, True, False])]),
    "take_along_dim": ((4, 1), lambda w: w["a"].take_along_dim(torch.tensor([[1], [0], [3], [5]]), dim=1)),
    "as_strided": ((3, 3), lambda w: w["a"].as_strided((3, 3), (7, 1), 2)),
    "diagonal": ((4,), lambda w: w["a"].diagonal()),
    "unfold": ((4, 2, 3), lambda w: w["a"].unfold(1, 3, 3)),
    "detach and data": ((4, 6), lambda w: w["a"].detach().data),
    "rotary halves": ((4, 6), lambda w: w["a"].view(4, 2, 3).transpose(1, 2).reshape(4, 6)),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_a_rearrangement_is_followed(trace: Trace, name: str) -> None:
    shape, rearrange = REARRANGED[name]
    made = trace(
        model(*shape),
        lambda live, weights: live.w.data.copy_(rearrange(weights)),
        {"a": A, "b": B},
    )
    assert made.table.obstacles == ()
    assert made.proven() or made.problems == ["unconsumed"] * len(made.problems)


CASTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "by the copy": (lambda w: w, ("bfloat16",)),
    "before the copy": (lambda w: w.to(torch.bfloat16), ("bfloat16",)),
    "by a detour": (lambda w: w.half(), ("float16", "bfloat16")),
    "there and back": (lambda w: w.half().float(), ("float16", "float32", "bfloat16")),
    "to what it is": (lambda w: w.float(), ("bfloat16",)),
    "of a view": (lambda w: w.t().to(torch.float64).t(), ("float64", "bfloat16")),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_is_seen_with_every_dtype_on_its_way(trace: Trace, name: str) -> None:
    cast, chain = CASTS[name]
    live = model(4, 6, dtype=torch.bfloat16)
    made = trace(live, lambda live, weights: live.w.data.copy_(cast(weights["a"])), {"a": A})
    assert made.casts == {chain}
    assert made.proven()


def column_write(live: Any, weights: Weights) -> None:
    live.w.data[:, 1::2].copy_(weights["a"])
    live.w.data[:, ::2].copy_(weights["b"])


def transposed_target(live: Any, weights: Weights) -> None:
    live.w.data.view(12, 4).t()[:, :6].copy_(weights["a"])
    live.w.data.view(12, 4).t()[:, 6:].copy_(weights["b"])


def setitem(live: Any, weights: Weights) -> None:
    live.w.data[0, :] = weights["a"].view(-1)[:12]
    for row in range(1, 4):
        live.w.data[row] = torch.cat([weights["a"][row], weights["b"][row]])


@pytest.mark.parametrize("load", [column_write, transposed_target, setitem])
def test_a_part_of_a_target_is_written_where_it_lies(trace: Trace, load: Any) -> None:
    made = trace(model(4, 12), load, {"a": A, "b": B})
    assert made.table.obstacles == ()
    assert made.proven() is (load is not setitem)
    assert set(made.problems) <= {"unconsumed"}


def test_a_target_that_is_not_contiguous_is_addressed_by_its_own_strides(trace: Trace) -> None:
    live = nn.Module()
    live.w = nn.Parameter(torch.randn(6, 4).t())
    made = trace(live, lambda live, weights: live.w.data.copy_(weights["a"]), {"a": A})
    assert made.table.targets[0].stride == (1, 4)
    assert made.proven()


def test_an_item_is_followed_into_a_fill(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data[0].fill_(weights["k"].item())
        live.w.data[1].fill_(weights["v"])
        live.w.data[2] = weights["q"]
        live.w.data[3].copy_(weights["o"][0])
        live.w.data[4] = weights["s"].item()
        live.w.data[5:].copy_(torch.full((1,), weights["f"].half().item()))

    scalars = {name: torch.empty(()) for name in "kvqsf"} | {"o": torch.empty(1)}
    made = trace(model(6, dtype=torch.bfloat16), load, scalars)
    placed = [(made.table.sources[item.source].canonical, item.casts) for item in made.table.placements]
    ways = [("bfloat16",), ("bfloat16",), ("bfloat16",), ("bfloat16",), ("bfloat16",)]
    assert placed == [*zip("kvqos", ways, strict=True), ("f", ("float16", "float32", "bfloat16"))]
    assert made.proven()


def test_tensors_without_elements_and_without_dimensions_are_traced(trace: Trace) -> None:
    live = nn.Module()
    live.empty = nn.Parameter(torch.empty(0, 4))
    live.scalar = nn.Parameter(torch.tensor(2.0))

    def load(live: Any, weights: Weights) -> None:
        for name, tensor in weights.items():
            getattr(live, name).data.copy_(tensor)

    made = trace(live, load, {"empty": torch.empty(0, 4), "scalar": torch.empty(())})
    assert [item.axes for item in made.table.placements] == [()]
    assert made.proven()


def in_a_pool(live: Any, weights: Weights) -> None:
    def one(number: int, name: str) -> None:
        live.w.data.narrow(0, 4 * number, 4).copy_(weights[name].t().contiguous().t())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2), "ab"))
        pool.submit(lambda: live.w.data[8:].fill_(0)).result()


def test_a_loader_with_a_thread_pool_is_followed_into_it(trace: Trace) -> None:
    made = trace(model(9, 6), in_a_pool, {"a": A, "b": B})
    assert [fill.target for fill in made.table.fills] == [0]
    assert made.proven()
    again = trace(model(9, 6), in_a_pool, {"a": A, "b": B})
    assert again.table.digest() == made.table.digest()


def test_a_loader_under_inference_mode_is_traced(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        with torch.inference_mode():
            live.w.data.copy_(torch.cat([weights["a"].t().contiguous().view(6, 4).t(), weights["b"]], dim=1))

    with torch.inference_mode():
        live = model(4, 12)
    made = trace(live, load, {"a": A, "b": B})
    assert made.proven()


def test_padding_is_a_fill_and_no_hole(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data[:4].copy_(weights["a"])
        live.w.data[4:6].fill_(0)
        live.w.data[6] = 0.5
        live.w.data[7].zero_()
        live.w.data[8:].copy_(torch.ones(6, dtype=torch.float16))

    made = trace(model(9, 6), load, {"a": A})
    assert [fill.value for fill in made.table.fills] == [0.0, 0.5, 0.0, 1.0]
    assert made.proven()


def test_zeroing_before_the_write_is_no_loss(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.zero_()
        live.w.data.copy_(weights["a"])

    assert trace(model(4, 6), load, {"a": A}).proven()
