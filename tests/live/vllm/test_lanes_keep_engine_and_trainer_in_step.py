"""Lanes from trainer ranks without vLLM into a live multiprocess vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane.front.process import FrontProcess

    Starter = Callable[[Path, int], AbstractContextManager[FrontProcess]]

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


@pytest.mark.requirement("R90", part="no LoRA, TP 1 and 2")
@pytest.mark.parametrize(
    ("folder", "workers", "syncs"), [("SmolLM2-135M-Instruct", 1, 3), ("SmolLM2-135M-Instruct-tp2", 2, 10)]
)
def test_the_real_model_stays_in_step_at_tp_1_and_2(
    models_dir: Path, start_front: Starter, folder: str, workers: int, syncs: int
) -> None:
    model = models_dir / folder
    with start_front(model, workers) as front:
        found = run_parity(
            model=model,
            engine="vllm",
            url=front.address,
            ranks=workers,
            syncs=syncs,
            seconds=1000,
            options={"tokens": 6},
        )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, syncs + 1)]
    assert all(f"digests equal on {workers}" in parity.verified[0] for parity in found)


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("ranks", "placement"), [(1, "replicated"), (2, "replicated"), (4, "replicated"), (4, "partitioned")]
)
def test_from_one_two_and_four_ranks_to_tp_2(
    tiny_front: FrontProcess, tiny_folder: Path, ranks: int, placement: str
) -> None:
    found = run_parity(
        model=tiny_folder,
        engine="vllm",
        url=tiny_front.address,
        ranks=ranks,
        syncs=3,
        seconds=300,
        options={"placement": placement, "bucket-bytes": 1 << 16},
    )
    assert all("digests equal on 2" in parity.verified[0] for parity in found)


def test_by_value_instead_of_the_ring(tiny_front: FrontProcess, tiny_folder: Path) -> None:
    run_parity(
        model=tiny_folder,
        engine="vllm",
        url=tiny_front.address,
        ranks=1,
        syncs=2,
        seconds=300,
        options={"transport": "inline", "bucket-bytes": 1 << 18},
    )
