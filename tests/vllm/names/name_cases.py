"""Namespaces of recorded cases, and every name resolution that went wrong elsewhere, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightlane.receiver import LiveTensor, NameRules, WorkerDescription

_DATA = Path(__file__).parents[1] / "data"
RESOLVE = json.loads((_DATA / "resolve_names.json").read_text())
NAMESPACES: dict[str, dict[str, Any]] = RESOLVE["namespaces"]
ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in RESOLVE["cases"]}
REPORTS: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((_DATA / "name_cases.json").read_text())
}


def worker(
    live: list[str],
    mapper: dict[str, dict[str, str]] | None = None,
    packed: dict[str, list[str]] | None = None,
    *,
    wrapper_loads: bool,
    expert_prefix: str = "",
) -> WorkerDescription:
    """A worker that describes a model with these live names."""
    tables = mapper or {}
    return WorkerDescription(
        worker=0,
        workers=1,
        host="here",
        process_id=1,
        incarnation="a",
        live=tuple(LiveTensor(name, (2,), "float32") for name in live),
        packed={owner: tuple(pieces) for owner, pieces in (packed or {}).items()},
        renames=tables.get("prefix", {}),
        rules=NameRules(
            substrings=tables.get("substr", {}),
            stacked=tables.get("stacked", {}),
            wrapper_loads=wrapper_loads,
            expert_prefix=expert_prefix,
        ),
    )


def recorded(namespace: str, *, wrapper_loads: bool, expert_prefix: str = "") -> WorkerDescription:
    """The worker of one recorded namespace."""
    told = NAMESPACES[namespace]
    return worker(
        told["live"],
        told.get("mapper"),
        told.get("packed"),
        wrapper_loads=wrapper_loads,
        expert_prefix=expert_prefix,
    )


def right_answer(row: dict[str, Any], *, wrapper_loads: bool) -> str:
    """What a row asks for: `desired` where it differs from what was seen."""
    flag = str(wrapper_loads).lower()
    answer: str = (
        row["desired"][flag] if "desired" in row else row["expect"][f"wrapper_has_load_weights={flag}"]
    )
    return answer
