#!/usr/bin/env python3
"""Tables of what benchmarks measured, from the results that are kept beside them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from rst_tables import list_table, literal

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


def gpu_table() -> str:
    """What `tests/gpu/vllm_over_cuda_ipc.py` measured: one row a run of syncs."""
    head = ("Mode", "`verify`", "Sent, MB", "Seconds", "of which loading", "Machine")
    return list_table(
        head, [_gpu_row(run, syncs) for run in _read("cuda_ipc.json") for syncs in run["syncs"]]
    )


def versions_table() -> str:
    """What `nox -s matrix` showed: one row a version of SGLang that no other session has."""
    found = _read("sglang_versions.json")
    head = ("SGLang", "Era", "Read as sent by its own classes", "Adapter's configuration", "Synced live")
    return list_table(
        head, [_version_row(version, shown) for version, shown in found["versions"].items()], css_class="wide"
    )


def _version_row(version: str, shown: dict[str, Any]) -> tuple[str, ...]:
    ways = [
        f"| {way['way']}: {way['syncs']} syncs, log-probs within {way['largest_difference']:.1e}"
        for way in shown["live"]
    ]
    if shown["adapters_refused"]:
        ways.append("| mode adapter: refused by name")
    if shown["restart_noticed"]:
        ways.append("| a server started anew: noticed")
    return (
        version,
        literal(shown["era"]),
        "\n".join(f"| {literal(name)}" for name in shown["requests"]),
        f"taken by {literal('LoRAConfig')}" if shown["adapter_config"] else "\u2013",
        "\n".join(ways) or "\u2013",
    )


def _gpu_row(run: dict[str, Any], syncs: dict[str, Any]) -> tuple[str, ...]:
    seconds, loading = syncs["seconds"], syncs["load_seconds"]
    return (
        syncs["mode"],
        syncs["verify"],
        f"{syncs['bytes'] / 1e6:,.0f}",
        f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        f"{median(loading):.3f}",
        f"{run['workers']} x {run['device']}, vLLM {run['vllm']}, torch {run['torch']}",
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
