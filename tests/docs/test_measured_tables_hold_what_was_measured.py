"""Tables of the site that benchmarks fill hold the figures of the results that are kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    import pytest


def test_each_run_of_the_export_is_a_row_beside_full_tensor(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = script("measured_tables")
    run = {
        "size": "4b",
        "ranks": 2,
        "device": "a GPU",
        "torch": "9.9",
        "tensors": 398,
        "bytes": 8_800_000_000,
        "largest_megabytes": 777.9,
        "weightlane": {"seconds": 0.1234, "worst_seconds": 0.2, "peak_megabytes": 1234.5},
        "full_tensor": {"seconds": 0.4567, "worst_seconds": 0.5, "peak_megabytes": 778.0},
    }
    (tmp_path / "fsdp_export.json").write_text(json.dumps([run, {**run, "ranks": 4}]))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    told = measured.export_table()
    for figure in (
        "0.123 (worst 0.200)",
        "0.457 (worst 0.500)",
        "1,234",
        "2 x a GPU",
        "4 x a GPU",
        "8.80 GB",
    ):
        assert figure in told


def test_the_results_that_are_kept_make_tables(script: Callable[[str], ModuleType]) -> None:
    measured = script("measured_tables")
    assert "NVIDIA H200" in measured.export_table()
    assert "Qwen3-30B-A3B" in measured.tracing_table()
