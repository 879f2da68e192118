"""Live ranks tell what they hold after a sync, as hashes; one element that is another is never published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import server_checks

import weightlane as wl
from weightlane.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.lane import Lane
    from weightlane.program import EngineCall
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

AGREES = 1e-4
CHANGED = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def trainer(tiny_folder: Path, trainer_of: Callable[[Path], Any]) -> Any:
    made = trainer_of(tiny_folder)
    made.change(seed=11)
    return made


def connect(server: RunningServer, trainer: Any, **options: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", url=server.url)],
        bucket_bytes=64 << 10,
        **options,
    )


def change_one_after_the_flush(lane: Lane) -> None:
    """Between the load and whatever comes then, one element of the live tensor becomes another on rank 1."""
    endpoint: Any = lane.replicas[0]
    call = endpoint.call

    def changing(asked: EngineCall, *, version: int | None = None) -> str:
        answer: str = call(asked, version=version)
        if asked.route.startswith("/flush_cache"):
            assert server_checks.told_by(endpoint, "change_one", f"1 {CHANGED}".encode()) == [0, 1]
        return answer

    endpoint.call = changing


def test_two_ranks_are_read_back_on_the_first_sync(tiny_server: RunningServer, trainer: Any) -> None:
    with connect(tiny_server, trainer) as lane:
        (replica,) = lane.plan().replicas
        assert replica.trace is not None
        assert replica.trace.padding > 0, "the vocabulary is padded"
        (first,) = lane.sync(version=21).replicas
        assert len(first.read_back) == 2
        found = sum(item.elements for item in first.read_back)
        assert found == replica.trace.elements + replica.trace.padding
        assert sum(item.not_comparable for item in first.read_back) == 0
        assert f"{found:,} elements read back equal on 2" in first.verified
        held = server_checks.told_by(lane.replicas[0], "checksums")  # type: ignore[arg-type]
        assert lane.sync(version=22).replicas[0].read_back == ()
        assert server_checks.told_by(lane.replicas[0], "checksums") == held  # type: ignore[arg-type]


def test_one_element_that_is_another_fails_the_sync_and_nothing_is_published(
    tiny_server: RunningServer, trainer: Any
) -> None:
    with connect(tiny_server, trainer) as lane:
        before = lane.replicas[0].describe_workers("sglang")[0].held_version
        change_one_after_the_flush(lane)
        with pytest.raises(
            VerificationError, match=rf"worker 1 of .*, in {CHANGED} \(from .*1 of 3 placements"
        ):
            lane.sync(version=23)
        assert lane.replicas[0].describe_workers("sglang")[0].held_version == before
        assert lane.state.replicas[0].paused
    with connect(tiny_server, trainer) as lane:
        assert lane.sync(version=24).replicas[0].read_back
        given = lane.replicas[0].generate(server_checks.PROMPTS, max_tokens=8)
        assert trainer.distance(server_checks.PROMPTS, given) <= AGREES


def test_without_reading_back_it_is_published_unnoticed(tiny_server: RunningServer, trainer: Any) -> None:
    # The control of the test before.
    with connect(tiny_server, trainer, read_back="never") as lane:
        change_one_after_the_flush(lane)
        (report,) = lane.sync(version=25).replicas
        assert report.read_back == ()
        given = lane.replicas[0].generate(server_checks.PROMPTS, max_tokens=8)
        assert {generation.weight_version for generation in given} == {25}
    with connect(tiny_server, trainer, read_back="always") as lane:
        assert all(lane.sync(version=version).replicas[0].read_back for version in (26, 27))
