"""`weightlane demo --mode adapter` as a user types it; mode full is the command of every CI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.testing.demo_run import run_demo_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_an_adapter_learns_and_the_rollout_follows(tmp_path: Path) -> None:
    document = run_demo_command(["--mode", "adapter"], folder=tmp_path, seconds=250)
    assert document["verdict"] == "PASS", document["reasons"]
    assert document["mode"] == "adapter"
    assert (tmp_path / "report.html").stat().st_size > 10_000
