"""After a sync vLLM generates what the trainer's model generates, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import weightlane as wl
from weightlane.front.client import FrontEndpoint

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 12
AGREES = 1e-4
MOVED = 1e-2


def test_three_syncs_each_move_and_match_the_trainer(
    tiny_front: FrontProcess, tiny_folder: Path, trainer_of: type
) -> None:
    trainer = trainer_of(tiny_folder)
    endpoint = FrontEndpoint(tiny_front.address, 120.0)
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("vllm", url=tiny_front.address)],
        transport="shm",
        bucket_bytes=64 << 10,  # many buckets
    ) as lane:
        for version in (1, 2, 3):
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            assert truth.distance(endpoint.generate(PROMPTS, max_tokens=TOKENS)) >= MOVED, "stale would pass"
            lane.sync(version=version)
            generations = endpoint.generate(PROMPTS, max_tokens=TOKENS)
            assert truth.distance(generations) <= AGREES
            assert {generation.weight_version for generation in generations} == {version}


@pytest.mark.requirement("R82")
def test_a_prefix_that_old_weights_cached_is_not_used(
    tiny_front: FrontProcess, tiny_folder: Path, trainer_of: type
) -> None:
    """Its control, where nothing empties the cache, is made beside an engine of this process's own."""
    trainer = trainer_of(tiny_folder)
    endpoint = FrontEndpoint(tiny_front.address, 120.0)
    prompt = (tuple(range(3, 203)),)  # more than one block of the cache
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("vllm", url=tiny_front.address)],
    ) as lane:
        endpoint.generate(prompt, max_tokens=4)
        assert trainer.change(seed=9) >= MOVED
        lane.sync(version=1)
        assert trainer.truth(prompt, 4).distance(endpoint.generate(prompt, max_tokens=4)) <= AGREES
