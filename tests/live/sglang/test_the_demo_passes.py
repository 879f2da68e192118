"""`weightlane demo --rollout sglang` as a user types it: started by the demo, and running already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.demo_run import run_demo_command

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.long_run  # as below
def test_the_demo_passes_against_an_engine_that_it_starts(sglang_python: Path, tmp_path: Path) -> None:
    document = run_demo_command(
        ["--rollout", "sglang", "--rollout-python", str(sglang_python)], folder=tmp_path, seconds=800
    )
    assert document["verdict"] == "PASS", document["reasons"]


@pytest.mark.long_run  # in every run the demo passes with an adapter, whose base goes first
def test_the_demo_passes_against_a_server_that_runs_already(
    tiny_server: RunningServer, tiny_folder: Path, tmp_path: Path
) -> None:
    document = run_demo_command(
        ["--rollout", "sglang", "--url", tiny_server.url, "--model", str(tiny_folder)],
        folder=tmp_path,
        seconds=800,
    )
    assert document["verdict"] == "PASS", document["reasons"]
