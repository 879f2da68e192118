"""Failures that were reported elsewhere, as data: each is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlane.messages import WireTensor
from weightlane.plan_check import check_against_expected
from weightlane.receiver import ExpectedTensor

if TYPE_CHECKING:
    from weightlane.errors import Problem

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "plan_cases.json").read_text())
}

Shapes = dict[str, list[int]]


def problems(sent: Shapes, expected: Shapes) -> list[Problem]:
    wires = [WireTensor(name, tuple(shape), "float32") for name, shape in sent.items()]
    wanted = [ExpectedTensor(name, tuple(shape)) for name, shape in expected.items()]
    return check_against_expected(wires, wanted, receiver="acme")


def found(sent: Shapes, expected: Shapes) -> set[tuple[str, str]]:
    return {(problem.kind, problem.subject) for problem in problems(sent, expected)}


def shapeless(names: list[str]) -> Shapes:
    return {name: [2] for name in names}


def test_case_te_11_one_element_is_not_broadcast_over_all_channels() -> None:
    case = CASES["te-11"]
    given = case["input"]
    (problem,) = problems({"name": given["shape"]}, {"name": given["receiver_shape"]})
    assert problem.kind == case["expected"]["reason"]
    assert all(word in str(problem) for word in case["expected"]["message_has"])


def test_case_te_12_an_embedding_of_another_vocabulary() -> None:
    given = CASES["te-12"]["input"]
    assert found({given["name"]: given["shape"]}, {given["name"]: given["receiver_shape"]}) == {
        ("shape", given["name"])
    }


def test_case_ex_12_a_tensor_that_nobody_exports() -> None:
    case = CASES["ex-12"]
    given = case["input"]
    assert found(shapeless(given["exported"]), shapeless(given["receiver_params"])) == {
        ("missing-name", name) for name in case["expected"]["missing"]
    }


def test_case_sp_06_a_full_sync_without_one_tensor() -> None:
    full = CASES["sp-06"]["input"]["cases"]["full_missing"]
    assert found(shapeless(full["loaded"]), shapeless(full["receiver"])) == {("missing-name", "c")}


def test_case_sp_10_an_engine_s_fused_name_on_the_wire() -> None:
    tensor = CASES["sp-10"]["input"]["tensor"]
    checkpoint = {"q_a_proj": [8192, 2048], "kv_a_proj_with_mqa": [8192, 2048]}
    assert ("extra-name", tensor["name"]) in found({tensor["name"]: tensor["shape"]}, checkpoint)


def test_case_tr_10_half_a_pair_that_the_loader_would_wait_for() -> None:
    case = CASES["tr-10"]
    sent = list(case["input"]["tensors"])
    whole = [*sent, *case["expected"]["missing"]]
    assert found(shapeless(sent), shapeless(whole)) == {
        ("missing-name", name) for name in case["expected"]["missing"]
    }
    assert found(shapeless(whole), shapeless(whole)) == set(), "the control"
