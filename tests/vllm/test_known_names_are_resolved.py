"""Names that were resolved wrongly elsewhere, as data; the engine's LoRA wrapper loads weights for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightlane.manifest import Manifest, TensorSpec
from weightlane.receiver import LiveTensor, NameEntry, WorkerDescription
from weightlane.types import Phase
from weightlane_vllm.names import UNKNOWN, map_names

DATA = json.loads((Path(__file__).parent / "data" / "resolve_names.json").read_text())
CASES = {case["id"]: case for case in DATA["cases"]}
# Reached only through a mapper that fuses names, which a worker does not describe yet: refused at connect.
NOT_REACHED_YET = {"gdn_plain"}


def resolved(name: str, namespace: dict[str, Any]) -> NameEntry:
    worker = WorkerDescription(
        worker=0,
        workers=1,
        host="here",
        process_id=1,
        incarnation="a",
        live=tuple(LiveTensor(live, (2,), "float32") for live in namespace["live"]),
        packed={owner: tuple(pieces) for owner, pieces in namespace.get("packed", {}).items()},
        renames=namespace.get("mapper", {}).get("prefix", {}),
    )
    (entry,) = map_names(Manifest(Phase.FULL, 1, (TensorSpec(name, (2,), "float32"),)), worker)
    return entry


@pytest.mark.requirement("R41")
@pytest.mark.requirement("R44", part="the segment is never added")
@pytest.mark.parametrize("case", CASES)
def test_what_travels_is_the_sender_s_own_spelling(case: str) -> None:
    row = CASES[case]
    assert resolved(row["incoming"], DATA["namespaces"][row["namespace"]]).wire == row["wire"]


@pytest.mark.requirement("R40")
@pytest.mark.requirement("R42")
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_REACHED_YET])
def test_it_reaches_a_live_tensor_if_there_is_one_and_else_says_so(case: str) -> None:
    row = CASES[case]
    namespace = DATA["namespaces"][row["namespace"]]
    entry = resolved(row["incoming"], namespace)
    assert bool(entry.targets) is row["has_a_home"]
    assert set(entry.targets) <= set(namespace["live"])
    assert (entry.rule == UNKNOWN) is not row["has_a_home"]


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("case", ["shared_gate_plain", "shared_up_plain"])
def test_both_projections_of_a_shared_expert_reach_the_fused_one(case: str) -> None:
    row = CASES[case]
    (target,) = resolved(row["incoming"], DATA["namespaces"][row["namespace"]]).targets
    assert target.endswith(".shared_expert.gate_up_proj.base_layer.weight")


def test_a_name_that_only_a_fusing_mapper_reaches_has_no_target_and_keeps_its_spelling() -> None:
    row = CASES["gdn_plain"]
    entry = resolved(row["incoming"], DATA["namespaces"][row["namespace"]])
    assert (entry.targets, entry.rule) == ((), UNKNOWN)
