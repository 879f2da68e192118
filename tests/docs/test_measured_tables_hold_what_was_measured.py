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


def test_each_mode_on_a_gpu_is_a_row_with_the_middle_and_both_ends(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = script("measured_tables")
    syncs = {"mode": "merged", "verify": "counts", "bytes": 2_345_000_000}
    syncs |= {"seconds": [0.5, 0.125, 0.25], "load_seconds": [0.01, 0.09, 0.05]}
    run = {
        "device": "a GPU",
        "vllm": "7.7",
        "torch": "9.9",
        "workers": 2,
        "syncs": [syncs, {**syncs, "mode": "full"}],
    }
    (tmp_path / "cuda_ipc.json").write_text(json.dumps([run]))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    told = measured.gpu_table()
    for figure in ("merged", "full", "counts", "2,345", "0.250 (0.125 to 0.500)", "0.050"):
        assert f"- {figure}\n" in told
    assert "2 x a GPU, vLLM 7.7, torch 9.9" in told


def test_each_version_of_the_matrix_is_a_row_with_what_was_shown_of_it(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = script("measured_tables")
    way = {"way": "merged", "syncs": 3, "largest_difference": 1.2e-6, "smallest_move": 0.2}
    shown = {"era": "an-era", "requests": ["OneReqInput"], "adapter_config": True, "live": [way]}
    live = {**shown, "restart_noticed": True, "adapters_refused": True}
    quiet = {
        **shown,
        "adapter_config": False,
        "live": [],
        "restart_noticed": False,
        "adapters_refused": False,
    }
    (tmp_path / "sglang_versions.json").write_text(json.dumps({"versions": {"9.9.1": live, "9.9.2": quiet}}))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    first, second = measured.versions_table().split("   * - 9.9.")[1:]
    for words in ("merged: 3 syncs, log-probs within 1.2e-06", "refused by name", "noticed", "``an-era``"):
        assert words in first
    assert "taken by" in first
    assert "``OneReqInput``" in second
    assert "syncs" not in second
    assert "taken by" not in second


def test_the_results_that_are_kept_make_tables(script: Callable[[str], ModuleType]) -> None:
    measured = script("measured_tables")
    assert "NVIDIA H200" in measured.export_table()
    assert "NVIDIA H200, vLLM 0.23.0" in measured.gpu_table()
    assert "Qwen3-30B-A3B" in measured.tracing_table()
