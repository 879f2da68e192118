"""What a loader leaves of a trace, a thread, a memory or a setting, takes nothing from what comes later."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from weightlane.trace import containers, plain_writes, tracing
from weightlane.trace.dispatch import Dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Trace = Callable[..., Any]  # of conftest.Traced
    Weights = dict[str, Tensor]

A = torch.arange(24.0).reshape(4, 6)


class Live(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 6))
        self.account: dict[str, Any] = {}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadPoolExecutor]]:
    monkeypatch.setattr(plain_writes, "_SECONDS_TO_END", 0.01)
    made: list[ThreadPoolExecutor] = []
    yield made
    for pool in made:
        pool.shutdown()


def load_in_a_kept_pool(pools: list[ThreadPoolExecutor]) -> Callable[[Any, Weights], None]:
    def load(live: Any, weights: Weights) -> None:
        if not pools:
            pools.append(ThreadPoolExecutor(1))
        for weight in weights.values():
            pools[0].submit(live.w.data.copy_, weight).result()

    return load


def test_a_thread_that_goes_on_is_told_and_writes_what_it_is_given_later(
    trace: Trace, pools: list[ThreadPoolExecutor]
) -> None:
    model, load = Live(), load_in_a_kept_pool(pools)
    made = trace(model, load, {"a": A})
    assert made.kinds == ["thread"]
    assert "goes on when the load has returned" in made.table.obstacles[0].detail
    load(model, {"a": A})
    assert torch.equal(model.w, A)


def test_without_an_end_of_the_run_that_thread_would_write_nowhere(
    trace: Trace, pools: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "over", property(lambda _: False, lambda *_: None), raising=False)
    model, load = Live(), load_in_a_kept_pool(pools)
    trace(model, load, {"a": A})
    load(model, {"a": A})
    assert not model.w.any()


def test_a_pool_that_ends_with_its_load_is_followed_and_no_obstacle(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        pool = ThreadPoolExecutor(1)  # nobody shuts it down: its threads end when it is collected
        pool.submit(live.w.data.copy_, weights["a"]).result()

    assert trace(Live(), load, {"a": A}).proven()


def test_a_thread_without_tensors_may_go_on(trace: Trace, pools: list[ThreadPoolExecutor]) -> None:
    def load(live: Any, weights: Weights) -> None:
        pools.append(ThreadPoolExecutor(1))
        pools[0].submit(int).result()
        live.w.data.copy_(weights["a"])

    assert trace(Live(), load, {"a": A}).kinds == []


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a view of a twin": lambda param: param.data,
    "a part of a twin": lambda param: param.data[1:],
    "zeros like a twin": torch.zeros_like,
}


@pytest.mark.parametrize("name", KEPT)
def test_memory_without_data_that_a_loader_keeps_is_refused(trace: Trace, name: str) -> None:
    kept: list[Tensor] = []

    def load(live: Any, weights: Weights) -> None:
        kept.append(KEPT[name](live.w))
        live.w.data.copy_(weights["a"])

    assert trace(Live(), load, {"a": A}).problems == ["trace-foreign"]
    kept[0].copy_(A[4 - len(kept[0]) :])  # what a later load would lose without a word
    assert kept[0].is_meta


def test_memory_without_data_that_a_loader_lets_go_is_no_obstacle(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live.cache = [live.w.data[1:], torch.zeros_like(live.w)]
        live.w.data.copy_(weights["a"])

    assert trace(Live(), load, {"a": A}).proven()


class Replaced(Live):
    """What a loader may make of a module."""


def test_settings_of_torch_and_what_modules_hold_deeper_are_put_back(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        torch.manual_seed(1)
        live.account["seen"]["w"].append(1)
        live.account["seen"]["other"] = 2
        live.__class__ = Replaced
        if weights["a"].sum() > 0:  # a look at a value, at which a trace stops the loader
            raise AssertionError

    model = Live()
    model.account = {"seen": {"w": []}}
    deep = model.account["seen"]["w"]
    torch.manual_seed(0)
    numbers = torch.get_rng_state()
    made = trace(model, load, {"a": A})
    assert made.kinds == ["value-dependent"]
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.account == {"seen": {"w": []}}
    assert model.account["seen"]["w"] is deep
    assert type(model) is Live


@pytest.mark.parametrize("undone", ["process_as_found", "note_contents"])
def test_without_putting_back_they_would_stay(
    undone: str, monkeypatch: pytest.MonkeyPatch, trace: Trace
) -> None:
    if undone == "process_as_found":
        monkeypatch.setattr(tracing, undone, contextlib.nullcontext)
    else:
        monkeypatch.setattr(containers, "_MOST_ENTRIES", -1)
    before = torch.get_rng_state()

    def load(live: Any, weights: Weights) -> None:
        torch.manual_seed(7)
        live.account["seen"].append(1)
        live.w.data.copy_(weights["a"])

    model = Live()
    model.account = {"seen": []}
    assert trace(model, load, {"a": A}).kinds == []
    assert torch.equal(torch.get_rng_state(), before) == (undone != "process_as_found")
    assert model.account["seen"] == ([] if undone == "process_as_found" else [1])
    torch.set_rng_state(before)
