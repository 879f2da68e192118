"""A lane has a live server release and resume memory by tag; what would end the server is not sent.

On CPU nothing is freed, and the plan says so; SGLang keeps track of its tags all the same, and ends itself
where they are resumed without having been released.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.errors import EngineDeadError, EngineError
from weightlane.program import EngineCall
from weightlane_sglang.contract import PAUSE_ROUTE, RELEASE_ROUTE, RESUME_ROUTE
from weightlane_sglang.endpoint import SglangEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.lane import Lane
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99))
AGREES = 1e-4
MOVED = 1e-2


def endpoint_of(lane: Lane) -> SglangEndpoint:
    (endpoint,) = lane.replicas
    assert isinstance(endpoint, SglangEndpoint)
    return endpoint


def assert_serves(lane: Lane, trainer: Any, version: int) -> None:
    generations = endpoint_of(lane).generate(PROMPTS, max_tokens=6)
    assert trainer.distance(PROMPTS, generations) <= AGREES
    assert {generation.weight_version for generation in generations} == {version}


def resume(tag: str) -> EngineCall:
    return EngineCall(RESUME_ROUTE, f'{{"tags":["{tag}"]}}')


@pytest.mark.requirement("R77", part="full weights")
@pytest.mark.requirement("R78")
@pytest.mark.requirement("R80", part="SGLang")
def test_sleeping_servers_are_synced_and_their_scheduler_agrees_on_what_is_released(
    tiny_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    trainer = trainer_of(tiny_folder)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", url=tiny_server.url)],
        release=("weights", "kv_cache"),
    ) as lane:
        assert "frees no memory" in str(lane.plan())
        endpoint = endpoint_of(lane)
        for version in (1, 2):
            assert trainer.change(seed=version) >= MOVED
            lane.sync(version=version)
            assert_serves(lane, trainer, version)
            assert endpoint._told_released() == frozenset()
            lane.sleep()
            assert endpoint._told_released() == {"weights", "kv_cache"}
        with pytest.raises(EngineError, match="it has released kv_cache, weights"):
            wl.connect(
                trainer=wl.trainer("torch", model=trainer.model),
                rollout=[wl.rollout("sglang", url=tiny_server.url)],
            )
        assert trainer.change(seed=3) >= MOVED
        lane.sync(version=3)
        assert_serves(lane, trainer, 3)
        lane.sleep()
        lane.wake()
        assert_serves(lane, trainer, 3)
        with pytest.raises(EngineError, match="this lane has not released it"):
            endpoint.call(resume("kv_cache"))
        assert_serves(lane, trainer, 3)


@pytest.mark.long_run
def test_without_the_check_a_resume_of_what_is_not_released_ends_the_server(
    start_server: Any, tiny_folder: Path, open_server: Callable[[RunningServer], SglangEndpoint]
) -> None:
    with start_server(tiny_folder, 1) as server:
        endpoint = open_server(server)
        body = b'{"tags":["kv_cache"]}'
        with pytest.raises(EngineDeadError):
            endpoint._channel.send("POST", RESUME_ROUTE, timeout_seconds=60, body=(body,), length=len(body))
        with pytest.raises(EngineDeadError):
            endpoint.generate(PROMPTS, max_tokens=2)


@pytest.mark.long_run
def test_requests_kept_go_on_with_the_new_weights_where_the_server_can_flush_beside_them(
    newer_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    trainer = trainer_of(tiny_folder)
    long_prompt = (tuple(range(3, 103)),)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", url=newer_server.url)],
        release=("kv_cache",),
        requests="keep",
    ) as lane:
        lane.sync(version=1)
        endpoint = endpoint_of(lane)
        endpoint.generate(long_prompt, max_tokens=4)  # a prefix of the old weights
        found: list[Any] = []
        running = threading.Thread(
            target=lambda: found.extend(endpoint.generate(PROMPTS[:1], max_tokens=200))
        )
        running.start()
        time.sleep(0.7)
        assert not found, "200 tokens take longer than the wait above"
        assert trainer.change(seed=9) >= MOVED
        lane.sync(version=2)
        running.join(60)
        assert len(found[0].token_ids) == 200, "it was not aborted"
        assert_serves(lane, trainer, 2)
        assert trainer.distance(long_prompt, endpoint.generate(long_prompt, max_tokens=4)) <= AGREES
        assert {PAUSE_ROUTE, RELEASE_ROUTE} <= {step.what for step in lane.plan().schedule.steps}
        lane.sleep()
        lane.wake()
        assert_serves(lane, trainer, 2)
