"""What a loader keeps of a trace, a thread or a memory, takes nothing from the loads that come later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from weightlane.trace import plain_writes
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
