"""A whole lane over the plugin's own classes: what vLLM is called, in order, and what it serves then."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pytest
import torch
from sleeping_llm import SHAPES, FakeSleepingLlm, sleeping_facts

import weightlane as wl
from weightlane.errors import NotServableError, PlanError, SyncError
from weightlane.front.client import FrontEndpoint
from weightlane.front.server import serve_front
from weightlane.front.socket_folder import socket_folder
from weightlane.waiting import wait_until
from weightlane_vllm.front_engine import LlmFrontEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightlane.facts import EngineFacts

    Serve: TypeAlias = Callable[[EngineFacts], tuple[FakeSleepingLlm, str]]

BOTH = ("weights", "kv_cache")


@pytest.fixture
def serve() -> Iterator[Serve]:
    with socket_folder() as folder:
        addresses: list[str] = []

        def start(facts: EngineFacts) -> tuple[FakeSleepingLlm, str]:
            llm = FakeSleepingLlm(facts)
            engine = LlmFrontEngine(llm, backend="vllm", start_seconds=30.0)
            engine.shutdown = engine.detach  # type: ignore[method-assign]  # its workers are in this process
            address = f"unix:{folder}/{len(addresses)}"
            threading.Thread(target=serve_front, args=(engine, address), daemon=True).start()
            addresses.append(address)
            path: Path = folder / address.rpartition("/")[2]
            wait_until(path.exists, seconds=10.0)
            return llm, address

        yield start
        for address in addresses:
            with closing(FrontEndpoint(address, 5.0)) as endpoint:
                endpoint.shutdown()


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def lane_to(weights: dict[str, torch.Tensor], address: str, *release: str) -> wl.Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("vllm", url=address)],
        transport="inline",
        release=release,
    )


def held(llm: FakeSleepingLlm) -> set[float]:
    return {
        float(value) for worker in llm.workers for item in worker.weights.values() for value in item.flatten()
    }


@pytest.mark.requirement("R78")
@pytest.mark.requirement("R80")
def test_sleep_then_sync_wakes_weights_before_and_the_cache_after_the_move(serve: Serve) -> None:
    llm, address = serve(sleeping_facts())
    weights = weights_of(1.0)
    with lane_to(weights, address, *BOTH) as lane:
        lane.sync(version=1)
        assert llm.calls == [
            "sleep(0)",
            "release_kv_cache_memory()",
            "reset_prefix_cache()",
            "wake_up(kv_cache)",
        ]
        del llm.calls[:]
        lane.sleep()
        assert llm.calls == ["sleep(2)"]
        assert lane.residency()[0].workers[1].released == BOTH
        with pytest.raises(NotServableError, match="has released kv_cache, weights"):
            lane.replicas[0].generate([[1]], max_tokens=1)
        weights.update(weights_of(2.0))
        lane.sync(version=2)
        assert llm.calls[1:] == ["wake_up(weights)", "reset_prefix_cache()", "wake_up(kv_cache)"]
        assert held(llm) == {2.0}


@pytest.mark.requirement("R78")
def test_weights_lost_to_level_2_are_not_served_before_a_sync(serve: Serve) -> None:
    llm, address = serve(sleeping_facts())
    with lane_to(weights_of(1.0), address, *BOTH) as lane:
        lane.sync(version=1)
        lane.sleep()
        lane.wake()
        assert not lane.residency()[0].workers[0].servable
        with pytest.raises(NotServableError, match="no full sync has written them"):
            lane.replicas[0].generate([[1]], max_tokens=1)
        lane.sync(version=2)
        assert lane.residency()[0].workers[0].servable
        assert held(llm) == {1.0}


def test_level_1_keeps_them_and_a_wake_is_enough(serve: Serve) -> None:
    llm, address = serve(sleeping_facts(lora=True, max_loras="1", max_lora_rank="8"))
    with lane_to(weights_of(3.0), address, *BOTH) as lane:
        lane.sync(version=1)
        lane.sleep()
        assert "sleep(1)" in llm.calls
        assert held(llm) != {3.0}
        assert not lane.state.replicas[0].servable
        lane.wake()
        assert held(llm) == {3.0}
        assert lane.state.replicas[0].servable
        assert lane.residency()[0].workers[0].servable


def test_an_engine_that_its_user_put_to_sleep_is_not_written_to(serve: Serve) -> None:
    llm, address = serve(sleeping_facts())
    with lane_to(weights_of(1.0), address) as lane:
        llm.sleep(2)
        with pytest.raises(SyncError, match="sleeps: it has released kv_cache, weights"):
            lane.sync(version=1)
        assert held(llm) != {1.0}
    llm.wake_up()
    with lane_to(weights_of(1.0), address, *BOTH) as lane:
        llm.sleep(2)
        lane.sync(version=2)
        assert held(llm) == {1.0}


def test_a_cpu_engine_is_refused_when_the_plan_is_made(serve: Serve) -> None:
    _, address = serve(msgspec.structs.replace(sleeping_facts(), device="cpu"))
    with pytest.raises(PlanError, match=r"\[release\] kv_cache: vLLM's sleep on a CPU build frees nothing"):
        lane_to(weights_of(1.0), address, *BOTH)
