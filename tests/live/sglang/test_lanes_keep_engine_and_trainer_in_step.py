"""Lanes from trainer ranks without SGLang into a live server over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane_sglang.launch import RunningServer

    Starter = Callable[[Path, int], AbstractContextManager[RunningServer]]

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("folder", "workers"), [("SmolLM2-135M-Instruct", 1), ("SmolLM2-135M-Instruct-tp2", 2)]
)
def test_the_real_model_at_tp_1_and_2_ten_times(
    models_dir: Path, start_server: Starter, folder: str, workers: int
) -> None:
    model = models_dir / folder
    with start_server(model, workers) as server:
        found = run_parity(
            model=model,
            engine="sglang",
            url=server.url,
            ranks=workers,
            syncs=10,
            seconds=1500,
            options={"tokens": 6},
        )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, 11)]
    assert all("unavailable" in parity.verified[0] for parity in found), "requests alone prove no counts"


@pytest.fixture(scope="module")
def tp2_server(start_server: Starter, tiny_folder: Path) -> Iterator[RunningServer]:
    with start_server(tiny_folder, 2) as server:
        yield server


@pytest.mark.parametrize(
    ("ranks", "placement"), [(1, "replicated"), (2, "replicated"), (4, "replicated"), (4, "partitioned")]
)
def test_from_one_two_and_four_ranks_to_tp_2(
    tp2_server: RunningServer, tiny_folder: Path, ranks: int, placement: str
) -> None:
    run_parity(
        model=tiny_folder,
        engine="sglang",
        url=tp2_server.url,
        ranks=ranks,
        syncs=3,
        seconds=300,
        options={"placement": placement, "bucket-bytes": 1 << 16},
    )
