"""SmolLM2-135M-Instruct into the reference engine, ten syncs over the ring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from weightlane.front.process import start_front_process
from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_greedy_tokens_and_logprobs_equal_the_trainers_after_each_of_ten_syncs(
    models_dir: Path, tmp_path: Path
) -> None:
    model = models_dir / "SmolLM2-135M-Instruct"
    tmp_path.chmod(0o700)
    address = f"unix:{tmp_path}/front"
    argv = [sys.executable, "-m", "weightlane.reference.server", "--model", str(model), "--address", address]
    with start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=300):
        found = run_parity(
            model=model,
            engine="reference",
            url=address,
            ranks=1,
            syncs=10,
            seconds=800,
            options={"tokens": 6},
        )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, 11)]
    assert all("digests equal on 1" in parity.verified[0] for parity in found)
