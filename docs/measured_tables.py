#!/usr/bin/env python3
"""Tables of what benchmarks measured, from the results that are kept beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rst_tables import list_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def export_table() -> str:
    """What `benchmarks/fsdp_export.py` measured: one row a run, weightlane beside `full_tensor`."""
    head = (
        "Model",
        "Ranks",
        "Seconds",
        "`full_tensor`, seconds",
        "Peak, MB",
        "`full_tensor`, peak",
        "Largest tensor, MB",
    )
    return list_table(head, [_export_row(run) for run in _read("fsdp_export.json")])


def tracing_table() -> str:
    """What `benchmarks/tracing.py` measured: one row a model."""
    found = _read("tracing.json")
    head = ("Model", "Tensors", "Planned, seconds", "of which coverage", "Table, KB", "Machine")
    machine = f"{found['cores']} cores, vLLM {found['vllm']}, torch {found['torch']}"
    return list_table(
        head,
        [
            (
                model["model"],
                f"{model['sources']:,}",
                f"{model['planned_seconds']:.2f}",
                f"{model['coverage_seconds']:.3f}",
                f"{model['table_bytes'] / 1e3:,.0f}",
                machine,
            )
            for model in found["models"]
        ],
    )


def _export_row(run: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs = run["weightlane"], run["full_tensor"]
    return (
        f"{run['size'].upper()}, bf16, {run['bytes'] / 1e9:.2f} GB, {run['tensors']} tensors",
        f"{run['ranks']} x {run['device']}, torch {run['torch']}",
        f"{ours['seconds']:.3f} (worst {ours['worst_seconds']:.3f})",
        f"{theirs['seconds']:.3f} (worst {theirs['worst_seconds']:.3f})",
        f"{ours['peak_megabytes']:,.0f}",
        f"{theirs['peak_megabytes']:,.0f}",
        f"{run['largest_megabytes']:,.0f}",
    )


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())
