"""The program of one sync, and the servers for which there is none."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.contexts import BuildRequestsContext, MapNamesContext
from weightlane.errors import PlanError
from weightlane.facts import ParallelSizes
from weightlane.manifest import Manifest, TensorSpec
from weightlane.program import with_lifecycle
from weightlane.receiver import ExpectedTensor, WorkerDescription
from weightlane.types import Capability, Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.adapter_contract import ADAPTER_ROUTES_USED
from weightlane_sglang.contract import ENCODES

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.facts import EngineFacts
    from weightlane.program import Program

DESCRIPTOR = plugin.weightlane_register_backends()[0]


def context(facts: EngineFacts, phase: Phase = Phase.FULL) -> BuildRequestsContext:
    return BuildRequestsContext(DESCRIPTOR, facts, phase, TransportName.INLINE, (), (), (), "counts")


def program(facts: EngineFacts) -> Program:
    built = plugin.weightlane_build_requests(context(facts))
    return with_lifecycle(built, plugin.weightlane_plan_lifecycle(context(facts)))


@pytest.mark.requirement("R30", part="full weights")
def test_every_field_sent_is_one_the_server_lists(facts_of: Callable[..., EngineFacts]) -> None:
    facts = facts_of()
    made = program(facts)
    request_of = {
        "/pause_generation": "PauseGenerationReqInput",
        "/update_weight_version": "UpdateWeightVersionReqInput",
    }
    for call in (*made.pause, *made.settle, *made.publish, *made.resume):
        sent = set(json.loads(call.body)) | ({call.version_field} - {""})
        assert sent <= set(facts.request_fields.get(request_of.get(call.route, ""), ()))
    sent = set(json.loads(made.move.body)) | {made.move.payload_field}
    assert sent <= set(facts.request_fields["UpdateWeightsFromTensorReqInput"])


def test_a_plan_tells_what_a_flush_leaves_of_encoders(facts_of: Callable[..., EngineFacts]) -> None:
    told = "SGLANG_VLM_CACHE_SIZE_MB=0"
    assert not any(told in note for note in program(facts_of()).notes)
    assert any(told in note for note in program(facts_of(attributes={ENCODES: True})).notes)


@pytest.mark.requirement("R30", part="full weights")
@pytest.mark.parametrize(
    ("request_name", "field"),
    [
        ("UpdateWeightsFromTensorReqInput", "abort_all_requests"),
        ("UpdateWeightsFromTensorReqInput", "serialized_named_tensors"),
        ("PauseGenerationReqInput", "mode"),
        ("UpdateWeightVersionReqInput", "new_version"),
        ("/flush_cache", "timeout"),
    ],
)
def test_a_field_the_server_does_not_list_is_a_plan_error(
    facts_of: Callable[..., EngineFacts], request_name: str, field: str
) -> None:
    fields = dict(facts_of().request_fields)
    fields[request_name] = tuple(name for name in fields[request_name] if name != field)
    with pytest.raises(PlanError, match=field):
        program(facts_of(request_fields=fields))


@pytest.mark.requirement("R82")
def test_one_payload_per_rank_and_no_flush_inside_an_update(facts_of: Callable[..., EngineFacts]) -> None:
    made = program(facts_of(parallel=ParallelSizes(tensor=4)))
    assert made.move.copies == 4
    assert json.loads(made.move.body)["flush_cache"] is False
    assert json.loads(made.move.last_body)["flush_cache"] is False
    assert [call.route for call in made.settle] == ["/flush_cache?timeout=30"]


def test_requests_waiting_at_the_server_are_not_aborted_by_publishing(
    facts_of: Callable[..., EngineFacts],
) -> None:
    (publish,) = program(facts_of()).publish
    assert json.loads(publish.body) == {"abort_all_requests": False}
    assert publish.version_field == "new_version"


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"parallel": ParallelSizes(tensor=1, data=2)}, "dp_size"),
        ({"parallel": ParallelSizes(tensor=1, pipeline=2)}, "pp_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"launch_arguments": {"speculative_algorithm": "EAGLE"}}, "speculative_algorithm"),
        ({"launch_arguments": {"weight_cache_mode": "shared"}}, "weight_cache_mode"),
        ({"launch_arguments": {"hicache_storage_backend": "file"}}, "hicache_storage_backend"),
        ({"launch_arguments": {"enable_lmcache": "true"}}, "enable_lmcache"),
        ({"launch_arguments": {"enable_flexkv": "true"}}, "enable_flexkv"),
        ({"launch_arguments": {"offload_group_size": "4"}}, "offload_group_size"),
        ({"launch_arguments": {"kt_weight_path": "/experts"}}, "kt_weight_path"),
        ({"launch_arguments": {"torchao_config": "int4wo-128"}}, "torchao_config"),
        ({"launch_arguments": {"modelopt_quant": "fp8"}}, "modelopt_quant"),
        ({"launch_arguments": {"tokenizer_worker_num": "2"}}, "tokenizer_worker_num"),
        (
            {"launch_arguments": {"json_model_override_args": '{"num_hidden_layers": 4}'}},
            "json_model_override_args",
        ),
    ],
)
def test_a_server_whose_weights_cannot_be_written_by_name_is_refused(
    facts_of: Callable[..., EngineFacts], changes: dict[str, Any], subject: str
) -> None:
    with pytest.raises(PlanError) as caught:
        program(facts_of(**changes))
    assert [problem.subject for problem in caught.value.problems] == [subject]


def test_switches_that_are_off_refuse_nothing(facts_of: Callable[..., EngineFacts]) -> None:
    off = {"enable_lmcache": "false", "enable_flexkv": "false", "enable_lora": "false"}
    defaults = {"offload_group_size": "-1", "tokenizer_worker_num": "1", "json_model_override_args": "{}"}
    program(facts_of(launch_arguments={**off, **defaults, "torchao_config": ""}))


@pytest.mark.requirement("R54", part="what is dropped is not sent")
@pytest.mark.parametrize(
    ("enable_lora", "name", "refused"),
    [
        ("true", "model.layers.0.mlp.experts.3.up_proj.weight", True),
        ("false", "model.layers.0.mlp.experts.3.up_proj.weight", False),
        ("true", "model.layers.0.mlp.up_proj.weight", False),
    ],
)
def test_experts_are_refused_where_lora_would_drop_them(
    facts_of: Callable[..., EngineFacts], enable_lora: str, name: str, refused: bool
) -> None:
    facts = facts_of(launch_arguments={"enable_lora": enable_lora})
    worker = WorkerDescription(0, 1, "h", 0, "i", expected=(ExpectedTensor(name, (2, 2)),))
    asked = dataclasses.replace(context(facts), workers=(worker,))
    if not refused:
        plugin.weightlane_build_requests(asked)
        return
    with pytest.raises(PlanError, match="did not write") as caught:
        plugin.weightlane_build_requests(asked)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.subject) == ("capability", "enable_lora")
    assert name in problem.what


def test_all_refusals_come_at_once(facts_of: Callable[..., EngineFacts]) -> None:
    with pytest.raises(PlanError) as caught:
        plugin.weightlane_build_requests(
            context(facts_of(quantization="fp8", parallel=ParallelSizes(data=2)), phase=Phase.ADAPTER)
        )
    told = {problem.subject for problem in caught.value.problems}
    assert told == {"dp_size", "quantization", *ADAPTER_ROUTES_USED}


def test_merged_weights_and_the_base_go_as_full_ones_do(facts_of: Callable[..., EngineFacts]) -> None:
    facts = facts_of()
    phases = (Phase.FULL, Phase.MERGED, Phase.BASE)
    made = [plugin.weightlane_build_requests(context(facts, phase)) for phase in phases]
    assert made[0] == made[1]
    assert made[2].move == made[0].move
    assert any("cannot tell which base" in note for note in made[2].notes)


def test_names_go_as_they_are_ties_are_dropped_and_strangers_marked(
    facts_of: Callable[..., EngineFacts],
) -> None:
    worker = WorkerDescription(
        0, 1, "h", 0, "i",
        expected=(
            ExpectedTensor("embed", (4, 2), "bfloat16"),
            ExpectedTensor("head", (4, 2), "bfloat16", tied_to="embed"),
            ExpectedTensor("count", (1,), "bfloat16"),
        ),
    )  # fmt: skip
    names = ("embed", "head", "count", "stranger")
    dtypes = ("float32", "float32", "int64", "float32")
    manifest = Manifest(
        Phase.FULL, 1, tuple(TensorSpec(name, (1,), dtype) for name, dtype in zip(names, dtypes, strict=True))
    )
    entries = plugin.weightlane_map_names(MapNamesContext(DESCRIPTOR, facts_of(), manifest, worker))
    assert [entry.wire for entry in entries] == list(names)
    assert [entry.dtype for entry in entries] == ["bfloat16", "float32", "int64", "float32"]
    assert "embed" in entries[1].dropped
    assert [entry.rule == "unknown" for entry in entries] == [False, False, False, True]
    assert not any(entry.targets for entry in entries)


def test_the_descriptor_promises_what_requests_alone_can_do() -> None:
    assert Capability.WORKER_AGENT not in DESCRIPTOR.capabilities
    received = {Capability.RECEIVE_FULL, Capability.RECEIVE_MERGED}
    assert received | {Capability.NATIVE_REQUESTS} <= DESCRIPTOR.capabilities
    assert DESCRIPTOR.versions.contains("0.5.18")
    assert not DESCRIPTOR.versions.contains("0.5.21")
    assert not DESCRIPTOR.versions.contains("0.5.9")


@pytest.mark.parametrize(
    ("host", "noted"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("10.0.0.7", True), ("gpu-3.example", True)],
)
def test_a_host_that_is_not_loopback_is_named_in_the_plan(
    facts_of: Callable[..., EngineFacts], host: str, noted: bool
) -> None:
    worker = WorkerDescription(0, 1, host, 0, "i")
    seen = dataclasses.replace(context(facts_of()), workers=(worker,))
    notes = [note for note in plugin.weightlane_build_requests(seen).notes if "not loopback" in note]
    assert bool(notes) == noted
    assert all(host in note for note in notes)
