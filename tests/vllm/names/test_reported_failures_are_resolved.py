"""Public reports of names that reached nothing, the wrong tensor, or a name that does not exist."""

from __future__ import annotations

import pytest
from name_cases import REPORTS, worker

from weightlane_vllm.lora_modules import receiver_modules
from weightlane_vllm.mapper import NameMapper
from weightlane_vllm.names import resolve
from weightlane_vllm.namespace import Namespace

RESOLVED = [case for case, report in REPORTS.items() if report["input"]["kind"] == "map_base_names"]


@pytest.mark.parametrize("case", RESOLVED)
def test_a_reported_name_travels_and_lands_where_the_report_wants_it(case: str) -> None:
    told, targets = REPORTS[case]["input"], REPORTS[case]["expected"]["targets"]
    space = Namespace.of(
        worker(
            told["receiver_params"],
            told["mapper"],
            told["packed"],
            wrapper_loads=False,  # all of them are older than 0.28
            # From 0.13 on the loader of wrapped experts looks for the segment.
            expert_prefix="base_layer." if "experts" in told else "",
        )
    )
    found = {name: resolve(name, space) for name in told["exported"]}
    assert {
        name: {"wire": item.wire, "param": item.target, "shard": item.shard or None}
        for name, item in found.items()
    } == targets


def test_a_vision_weight_is_not_taken_for_one_of_the_language_model() -> None:
    # The bare rule of vm-02 makes a name of the language model of it, which might exist there.
    report = REPORTS["vm-02"]
    (name,) = report["input"]["exported"]
    naive = report["expected"]["naive_mapper_output"][name]
    mapper = report["input"]["mapper"]
    assert NameMapper(prefixes=mapper["prefix"]).mapped(name) == naive
    assert resolve(name, Namespace.of(worker(["unrelated.weight"], mapper, wrapper_loads=True))).target == ""


def test_a_piece_is_not_found_inside_a_fused_name() -> None:
    told = REPORTS["vm-07"]
    space = Namespace.of(
        worker(told["input"]["receiver_params"], None, told["input"]["packed"], wrapper_loads=True)
    )
    reached = {resolve(name, space).target for name in told["input"]["exported"]}
    assert told["expected"]["must_not"] not in reached
    broken = NameMapper(stacked={"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"})
    assert broken.mapped(told["input"]["exported"][0]) == told["expected"]["must_not"], "what the engine made"


@pytest.mark.parametrize("table", ["bare_last", "bare_first"])
def test_prefixes_are_renamed_one_after_another_in_the_table_s_order(table: str) -> None:
    report = REPORTS["vm-09"]
    mapper = NameMapper(prefixes=report["input"]["tables"][table])
    assert [mapper.mapped(name) for name in report["input"]["names"]] == report["expected"][table]


def test_expert_modules_of_an_adapter_get_the_receiver_s_names() -> None:
    told = REPORTS["mo-10"]["input"]
    mapper = NameMapper(substrings=told["mapper"]["substr"])
    assert receiver_modules(told["names"], mapper, told["leaf"]) == REPORTS["mo-10"]["expected"]["result"]
