"""A loader that does more than move elements is refused by the operator's name, and is never guessed at."""

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

A, B, ONE = torch.empty(4, 6), torch.empty(4, 6), torch.empty(())
SOURCES = {"a": A, "b": B, "one": ONE}


class Live(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))
        self.other = nn.Parameter(torch.randn(4, 6))
        self.plain = torch.randn(4, 6)
        self.scale = 1.0


def put(compute: Callable[[Weights], Tensor]) -> Callable[[Any, Weights], None]:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(compute(weights))

    return load


def double(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"])
    live.w.data.mul_(2)


def filled_after(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"])
    live.w.data[1].fill_(0)


def staged(live: Any, weights: Weights) -> None:
    buffer = torch.zeros(4, 6)
    buffer.copy_(weights["a"])
    live.w.data.copy_(buffer)


def staged_in_its_like(live: Any, weights: Weights) -> None:
    buffer = torch.empty_like(weights["a"])
    buffer.copy_(weights["b"])
    live.w.data.copy_(buffer)


def staged_by_new(live: Any, weights: Weights) -> None:
    buffer = weights["a"].new_zeros(4, 6)
    buffer[1:].copy_(weights["a"][1:])
    live.w.data.copy_(buffer)


def changed(live: Any, weights: Weights) -> None:
    weights["a"].mul_(2)
    live.w.data.copy_(weights["a"])


def changed_afterwards(live: Any, weights: Weights) -> None:
    kept = weights["a"].view(24)
    kept[3:].add_(1)
    live.w.data.copy_(weights["a"])


def changed_as_bytes(live: Any, weights: Weights) -> None:
    weights["a"].view(torch.int32).bitwise_not_()
    live.w.data.copy_(weights["a"])


def changed_then_rearranged(live: Any, weights: Weights) -> None:
    weights["a"].mul_(2)
    live.w.data.copy_(weights["a"].flip(0))


def plain_attribute(live: Any, weights: Weights) -> None:
    live.plain.copy_(weights["a"])


def plain_attribute_by_constant(live: Any, weights: Weights) -> None:
    live.plain.fill_(0)
    live.plain[1:].mul_(2)


def plain_attribute_in_a_pool(live: Any, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(plain_attribute_by_constant, live, weights).result()


def double_in_a_pool(live: Any, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(double, live, weights).result()


def put_into_out(live: Any, weights: Weights) -> None:
    torch.exp(weights["a"], out=live.w.data)


def put_by_foreach(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"])
    live.other.data.copy_(weights["b"])
    torch._foreach_mul_([live.w.data, live.other.data], 2.0)


def put_by_index(live: Any, weights: Weights) -> None:
    live.w.data[torch.tensor([0, 1, 2, 3])] = weights["a"]


def a_made_tensor(live: Any, weights: Weights) -> None:
    live.w.data.copy_(torch.arange(24.0).view(4, 6))


def a_constant_that_was_changed(live: Any, weights: Weights) -> None:
    made = torch.zeros(4, 6)
    made[1:].add_(1)
    live.w.data.copy_(made)


def a_copy_within_the_model(live: Any, weights: Weights) -> None:
    live.other.data.copy_(weights["a"])
    live.w.data.copy_(live.other)


def rounded_token(live: Any, weights: Weights) -> None:
    live.w.data.fill_(torch.tensor(weights["one"].item()))


REFUSED: dict[str, tuple[Callable[[Any, Weights], None], str, str]] = {
    "exp": (put(lambda w: -torch.exp(w["a"].float())), "computed", "aten.exp"),
    "sum": (put(lambda w: w["a"] + w["b"]), "computed", "aten.add"),
    "pad": (put(lambda w: nn.functional.pad(w["a"][:3], (0, 0, 0, 1))), "computed", "aten.constant_pad_nd"),
    "bytes": (put(lambda w: w["a"].view(torch.int32).view(torch.float32)), "computed", "aten.view"),
    "cat with a constant": (
        put(lambda w: torch.cat([w["a"][:3], torch.zeros(1, 6)])),
        "computed",
        "aten.cat",
    ),
    "index from a source": (put(lambda w: torch.ones(9, 6)[w["a"][:, 0].long()]), "computed", "aten.index"),
    "order from a source": (put(lambda w: w["a"][w["b"][:, 0].long()]), "computed", "aten.index"),
    "where": (put(lambda w: torch.where(w["a"] > 0, w["a"], w["b"])), "computed", "aten.gt"),
    "sorted": (put(lambda w: w["a"].sort()[0]), "computed", "aten.sort"),
    "memory of a copy": (
        put(lambda w: w["a"].t().contiguous().as_strided((4, 6), (6, 1))),
        "computed",
        "aten.as_strided",
    ),
    "in place": (double, "computed", "aten.mul_"),
    "in place in a pool": (double_in_a_pool, "computed", "aten.mul_"),
    "out": (put_into_out, "computed", "aten.exp"),
    "foreach": (put_by_foreach, "computed", "aten._foreach_mul_"),
    "index put": (put_by_index, "computed", "aten.index_put_"),
    "made tensor": (a_made_tensor, "computed", "aten.copy_"),
    "changed constant": (a_constant_that_was_changed, "computed", "aten.copy_"),
    "copy within the model": (a_copy_within_the_model, "computed", "aten.copy_"),
    "token in a tensor": (rounded_token, "computed", "aten.fill_"),
    "fill after write": (filled_after, "overwritten", "fill_"),
    "staged": (staged, "staged", "aten.copy_"),
    "staged in its like": (staged_in_its_like, "staged", "aten.copy_"),
    "staged by new": (staged_by_new, "staged", "aten.copy_"),
    "changed": (changed, "changed-source", "aten.mul_"),
    "changed through a view": (changed_afterwards, "changed-source", "aten.add_"),
    "changed as bytes": (changed_as_bytes, "changed-source", "aten.bitwise_not_"),
    "changed, rearranged": (changed_then_rearranged, "changed-source", "aten.mul_"),
    "plain attribute": (plain_attribute, "foreign", "aten.copy_"),
    "plain attribute, constant": (plain_attribute_by_constant, "foreign", "aten.fill_"),
    "plain attribute, pool": (plain_attribute_in_a_pool, "foreign", "aten.fill_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_an_obstacle_that_names_the_operator(trace: Trace, name: str) -> None:
    load, kind, operator = REFUSED[name]
    made = trace(Live(), load, SOURCES)
    assert (kind, operator) in list(zip(made.kinds, made.operators, strict=True))
    assert f"trace-{kind}" in made.problems


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "bool": bool,
    "if": lambda one: 1 if one > 0 else 0,
    "float": float,
    "int": int,
    "index": lambda one: [1, 2][one.long()],
    "item compared": lambda one: one.item() == 1.0,
    "item as a truth": lambda one: bool(one.item()),
    "item rounded": lambda one: round(one.item()),
    "item times two": lambda one: one.item() * 2,
    "item of a sum": lambda one: (one + 1).item(),
    "equal": lambda one: torch.equal(one, torch.ones(())),
    "allclose": lambda one: torch.allclose(one, torch.ones(())),
    "any": lambda one: bool(torch.isnan(one).any()),
    "numpy": lambda one: one.numpy(),
    "tolist": lambda one: one.tolist(),
    "data_ptr": lambda one: one.data_ptr(),
    "nonzero": lambda one: one.view(1).nonzero(),
    "unique": lambda one: one.view(1).unique(),
}


@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_value_is_an_obstacle_though_the_loader_goes_on(
    trace: Trace, name: str, swallowed: bool
) -> None:
    def load(live: Any, weights: Weights) -> None:
        for key in ("w", "other"):
            getattr(live, key).data.copy_(weights["a" if key == "w" else "b"])
        try:
            LOOKS[name](weights["one"])
        except Exception:
            if not swallowed:
                raise
        live.w.data[0, 0].fill_(weights["one"].item())

    made = trace(Live(), load, SOURCES)
    assert "value-dependent" in made.kinds
    assert "trace-value-dependent" in made.problems


def test_an_item_that_is_written_nowhere_is_a_decision(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.scale = weights["one"].item()
        live.w.data.copy_(weights["a"])

    assert trace(Live(), load, SOURCES).kinds == ["value-dependent"]


def test_a_thread_that_ran_before_is_told_of(trace: Trace) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        made = trace(Live(), lambda live, weights: pool.submit(double, live, weights).result(), SOURCES)
    assert "thread" in made.kinds


def test_a_second_write_of_the_same_elements_is_counted(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.w.data.copy_(weights["a"])
        live.w.data[3:].copy_(weights["b"][3:])
        live.other.data.copy_(weights["b"])

    made = trace(Live(), load, {"a": A, "b": B})
    assert made.kinds == []
    assert made.problems == ["uncovered"]
