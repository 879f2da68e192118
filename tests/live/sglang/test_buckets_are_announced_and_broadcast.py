"""Transport `collective`: buckets are announced to a live server, then broadcast to its schedulers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.errors import EngineError
from weightlane.testing.parity_run import run_parity
from weightlane_sglang.contract import END_UPDATE_ROUTE
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
WITHIN_SECONDS = 30.0


def connect(trainer: Any, server: RunningServer) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", url=server.url)],
        transport="collective",
        bucket_bytes=64 << 10,
    )


def endpoint_of(lane: Lane) -> SglangEndpoint:
    (endpoint,) = lane.replicas
    assert isinstance(endpoint, SglangEndpoint)
    return endpoint


def sync_and_compare(lane: Lane, trainer: Any, version: int) -> None:
    assert trainer.change(seed=version) >= MOVED
    lane.sync(version=version)
    generations = endpoint_of(lane).generate(PROMPTS, max_tokens=6)
    assert trainer.distance(PROMPTS, generations) <= AGREES
    assert {generation.weight_version for generation in generations} == {version}


def test_two_schedulers_take_each_bucket_and_a_refusal_leaves_nobody_alone(
    tiny_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    trainer = trainer_of(tiny_folder)
    with connect(trainer, tiny_server) as lane:
        assert "broadcast by rank 0 over gloo to 2 ranks" in str(lane.plan())
        assert len(lane.plan().buckets) > 3
        for version in (1, 2):
            sync_and_compare(lane, trainer, version)
        endpoint = endpoint_of(lane)
        group = endpoint._announced._group
        assert group is not None
        channel, post = endpoint._channel, endpoint._channel.send

        def refuse_one(method: str, route: str, **rest: Any) -> bytes:
            if route == "/update_weights_from_distributed":
                channel.send = post  # type: ignore[method-assign]
                raise EngineError("refused before anybody joined")
            return post(method, route, **rest)

        channel.send = refuse_one  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(EngineError, match="refused before anybody joined"):
            lane.sync(version=3)
        assert time.monotonic() - began < WITHIN_SECONDS, "a rank alone in a broadcast would wait two minutes"
        sync_and_compare(lane, trainer, 4)
        assert endpoint._announced._group is not group, "under another name"


def synced_by_two_ranks(server: RunningServer, model: Path, trainer: str) -> None:
    found = run_parity(
        model=model,
        engine="sglang",
        url=server.url,
        ranks=2,
        syncs=3,
        seconds=600,
        options={
            "bucket-bytes": 64 << 10,
            "tokens": 6,
            "transport": "collective",
            "trainer": trainer,
            "training": "optimizer",
            "learning-rate": 0.001,
        },
        plan_says="broadcast by rank 0 over gloo",
    )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in (1, 2, 3)]


@pytest.mark.long_run
@pytest.mark.parametrize("trainer", ["fsdp", "torch"])
def test_two_trainer_ranks_sync_two_schedulers_in_a_session(
    newer_server: RunningServer, tiny_folder: Path, trainer: str
) -> None:
    synced_by_two_ranks(newer_server, tiny_folder, trainer)


@pytest.mark.long_run
def test_two_trainer_ranks_sync_one_scheduler(start_server: Any, tiny_folder: Path) -> None:
    with start_server(tiny_folder, 1) as server:
        synced_by_two_ranks(server, tiny_folder, "fsdp")


@pytest.mark.long_run
def test_a_session_that_somebody_ended_is_noticed_in_the_broadcast(
    newer_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    """The server refuses an update outside of a session, and its schedulers never join the broadcast."""
    trainer = trainer_of(tiny_folder)
    with connect(trainer, newer_server) as lane:
        sync_and_compare(lane, trainer, 1)
        endpoint = endpoint_of(lane)
        send = endpoint.send_bucket
        sent: list[int] = []

        def after_somebody_s_end(*arguments: Any, **rest: Any) -> None:
            sent.append(1)
            if len(sent) == 2:
                endpoint._channel.send("POST", END_UPDATE_ROUTE, timeout_seconds=60, body=(b"{}",), length=2)
            send(*arguments, **rest)

        endpoint.send_bucket = after_somebody_s_end  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(EngineError, match="somebody else ended it"):
            lane.sync(version=2)
        assert time.monotonic() - began < WITHIN_SECONDS
        sync_and_compare(lane, trainer, 3)
