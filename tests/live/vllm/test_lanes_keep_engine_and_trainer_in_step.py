"""Lanes from trainer ranks without vLLM into a live multiprocess vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_ways import Way, shown

from weightlane.testing.parity_run import run_parity
from weightlane_vllm.launch import LoraStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane.front.process import FrontProcess
    from weightlane.testing.parity_result import SyncParity

    Starter = Callable[..., AbstractContextManager[FrontProcess]]

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


def way(tensor_parallel: int, mode: str, trainer: str) -> Way:
    return Way("our front", "real", tensor_parallel, mode, trainer)


REAL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def real_front(models_dir: Path, start_front: Starter) -> Iterator[FrontProcess]:
    """The real model at TP 1, with LoRA on."""
    with start_front(models_dir / REAL, 1, LoraStart(slots=2, rank=16)) as front:
        yield front


def in_step(
    model: Path, front: FrontProcess, *, ranks: int, syncs: int, options: dict[str, str | int] | None = None
) -> list[SyncParity]:
    found = run_parity(
        model=model,
        engine="vllm",
        url=front.address,
        ranks=ranks,
        syncs=syncs,
        seconds=1000,
        options={"tokens": 6, **(options or {})},
    )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, syncs + 1)]
    return found


@pytest.mark.requirement("R91", part="FSDP, at TP 1")
@pytest.mark.parametrize(
    "mode",
    [
        *(
            pytest.param(mode, marks=[pytest.mark.long_run, *shown(way(1, mode, "fsdp"))])
            for mode in ("full", "merged")
        ),
        pytest.param("adapter", marks=shown(way(1, "two_slot", "fsdp"))),
    ],
)
def test_fsdp2_on_two_ranks_stays_in_step_over_optimizer_steps(
    models_dir: Path, real_front: FrontProcess, mode: str, syncs: int
) -> None:
    sharded: dict[str, str | int] = {"trainer": "fsdp", "mode": mode, "training": "optimizer"}
    found = in_step(models_dir / REAL, real_front, ranks=2, syncs=syncs, options=sharded)
    first = ("base", "adapter") if mode == "adapter" else (mode,)
    assert [parity.phases for parity in found] == [first, *[(mode,)] * (syncs - 1)]
    assert all("digests equal on 1" in parity.verified[0] for parity in found)


@pytest.mark.requirement("R90", part="no LoRA, TP 1 and 2")
@pytest.mark.way(way(2, "full", "torch"))
def test_the_real_model_stays_in_step_at_tp_2(models_dir: Path, start_front: Starter) -> None:
    model = models_dir / f"{REAL}-tp2"
    with start_front(model, 2) as front:
        found = in_step(model, front, ranks=1, syncs=10)
    assert all("digests equal on 2" in parity.verified[0] for parity in found)


@pytest.mark.long_run
@pytest.mark.requirement("R91", part="FSDP, at TP 2")
@pytest.mark.way(way(2, "full", "fsdp"))
@pytest.mark.way(way(2, "merged", "fsdp"))
@pytest.mark.way(way(2, "two_slot", "fsdp"))
def test_every_mode_of_the_real_model_at_tp_2(models_dir: Path, start_front: Starter, syncs: int) -> None:
    model = models_dir / f"{REAL}-tp2"
    with start_front(model, 2, LoraStart(slots=2, rank=16)) as front:
        for mode in ("full", "merged", "adapter"):
            sharded: dict[str, str | int] = {"trainer": "fsdp", "mode": mode, "training": "optimizer"}
            found = in_step(model, front, ranks=2, syncs=syncs, options=sharded)
            assert all("digests equal on 2" in parity.verified[0] for parity in found)
