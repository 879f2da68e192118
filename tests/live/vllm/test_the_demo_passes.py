"""`weightlane demo --rollout vllm` as a user types it, with the interpreter of vLLM's environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.demo_run import run_demo_command

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.long_run  # an engine that runs already has the same demo in every run
def test_the_demo_passes_against_an_engine_that_it_starts(vllm_python: Path, tmp_path: Path) -> None:
    document = run_demo_command(
        ["--rollout", "vllm", "--rollout-python", str(vllm_python)], folder=tmp_path, seconds=800
    )
    assert document["verdict"] == "PASS", document["reasons"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_demo_passes_against_an_engine_that_runs_already(
    tiny_front: FrontProcess, tiny_folder: Path, tmp_path: Path
) -> None:
    document = run_demo_command(
        ["--rollout", "vllm", "--url", tiny_front.address, "--model", str(tiny_folder)],
        folder=tmp_path,
        seconds=800,
    )
    assert document["verdict"] == "PASS", document["reasons"]
