"""SmolLM2-135M-Instruct into one reference engine over the ring: full, merged, and an adapter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from weightlane.front.process import start_front_process
from weightlane.testing.parity import IN_PROCESS
from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightlane.testing.parity_result import SyncParity

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(models_dir: Path) -> Path:
    return models_dir / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    folder.chmod(0o700)
    at = f"unix:{folder}/front"
    argv = [sys.executable, "-m", "weightlane.reference.server", "--model", str(model), "--address", at]
    with start_front_process(argv, at, log=folder / "log", ready_timeout_seconds=300):
        yield at


def parities(model: Path, address: str, *, ranks: int, syncs: int, **options: str | int) -> list[SyncParity]:
    return run_parity(
        model=model,
        engine="reference",
        url=address,
        ranks=ranks,
        syncs=syncs,
        seconds=200 + 40 * syncs,
        options={"tokens": 6, **options},
    )


def test_greedy_tokens_and_logprobs_equal_the_trainers_after_each_sync(
    model: Path, address: str, syncs: int
) -> None:
    found = parities(model, address, ranks=1, syncs=syncs)
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, syncs + 1)]
    assert all("digests equal on 1" in parity.verified[0] for parity in found)


@pytest.mark.long_run
def test_optimizer_steps_travel_merged(model: Path, address: str, syncs: int) -> None:
    found = parities(model, address, ranks=1, syncs=syncs, mode="merged", training="optimizer")
    assert [parity.phases for parity in found] == [("merged",)] * syncs


def test_the_base_comes_once_then_optimizer_steps_travel_as_adapters(
    model: Path, address: str, syncs: int
) -> None:
    """Whatever the syncs before left there, it is not the checkpoint's base, which two ranks train on."""
    adapter = {"mode": "adapter", "training": "optimizer"}
    found = parities(model, address, ranks=2, syncs=syncs, **adapter)
    assert [parity.phases for parity in found] == [("base", "adapter"), *[("adapter",)] * (syncs - 1)]
    assert all("adapter bound to 210 modules on 1" in parity.verified[0] for parity in found)
    # A lane that is connected anew compares all values, and finds the base as it was sent.
    (again,) = parities(model, address, ranks=1, syncs=1, **adapter)
    assert again.phases == ("adapter",)


@pytest.mark.long_run
@pytest.mark.parametrize("mode", ["full", "merged", "adapter"])
def test_fsdp2_on_two_ranks_stays_in_step_over_optimizer_steps(model: Path, mode: str, syncs: int) -> None:
    """The engine is rank 0's own, so that its base can be seen: no sync of an adapter changes a bit of it."""
    found = parities(model, IN_PROCESS, ranks=2, syncs=syncs, trainer="fsdp", mode=mode, training="optimizer")
    first = ("base", "adapter") if mode == "adapter" else (mode,)
    assert [parity.phases for parity in found] == [first, *[(mode,)] * (syncs - 1)]
    assert [parity.base_unchanged for parity in found] == [True if mode == "adapter" else None] * syncs
