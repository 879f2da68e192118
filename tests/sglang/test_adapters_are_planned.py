"""Which adapters SGLang takes, in which form and in which request, by fields that it lists and its launch."""

from __future__ import annotations

import base64
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.contexts import BuildRequestsContext, ExpressAdapterContext, LaunchContext
from weightlane.errors import PlanError
from weightlane.facts import ParallelSizes
from weightlane.peft import ModuleLora, adapter_of_modules
from weightlane.peft.features import refused_features
from weightlane.types import Mode, Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.adapter_contract import ADAPTER_FIELDS_USED, ADAPTER_ROUTES_USED, LOAD_REQUEST
from weightlane_sglang.adapter_expression import express
from weightlane_sglang.adapter_targets import fused_module
from weightlane_sglang.contract import ROUTES_USED
from weightlane_sglang.loader_name import LOADER
from weightlane_sglang.payload import EncodedBucket, request_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.facts import EngineFacts

WITHOUT_SESSION, IN_SESSION, *_ = plugin.weightlane_register_backends()
LAYER = "model.layers.0"
QKV = tuple(f"{LAYER}.self_attn.{side}_proj" for side in "qkv")
DOWN, GATE = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_proj"
_COMMON = ("rid", "http_worker_ipc", "lora_name", "config_dict")
_OPTIONAL = ("pinned", "added_tokens_config", "lora_id")
ERAS = {
    "0.5.8": (*_COMMON, "serialized_tensors", *_OPTIONAL),
    "0.5.10": (*_COMMON, "serialized_tensors", *_OPTIONAL, "load_format"),
    "0.5.16": (*_COMMON, "serialized_tensors", *_OPTIONAL, "load_format", "expected_checksums"),
    "0.5.17": (*_COMMON, "serialized_named_tensors", *_OPTIONAL, "load_format", "expected_checksums"),
}
"""Fields of the request in the published sources of these versions."""


@pytest.fixture
def lora_facts(facts_of: Callable[..., EngineFacts]) -> Callable[..., EngineFacts]:
    """Facts of a server that takes adapters, with launch arguments or fields replaced."""

    def make(*, fields: tuple[str, ...] = ERAS["0.5.17"], tensor: int = 2, **arguments: str) -> EngineFacts:
        launched = {
            "enable_lora": "true",
            "max_lora_rank": "8",
            "lora_target_modules": "all",
            "max_loras_per_batch": "3",
            "custom_weight_loader": LOADER,
        }
        known = facts_of()
        return facts_of(
            request_fields={**known.request_fields, **ADAPTER_FIELDS_USED, LOAD_REQUEST: fields},
            routes=(*ROUTES_USED, *ADAPTER_ROUTES_USED),
            parallel=ParallelSizes(tensor=tensor),
            launch_arguments={**launched, **arguments},
        )

    return make


def adapter(*modules: str, rank: int = 8, alpha: float = 16.0, features: dict[str, str] | None = None) -> Any:
    return adapter_of_modules("default", {name: ModuleLora(rank, alpha) for name in modules}, features)


def expressed(facts: EngineFacts, found: Any, swap: Any = "two_slot") -> Any:
    from weightlane.receiver import ExpectedTensor, WorkerDescription

    names = (*QKV, DOWN, GATE, f"{LAYER}.mlp.up_proj")
    expected = tuple(ExpectedTensor(f"{name}.weight", (8, 8), "float32") for name in names)
    worker = WorkerDescription(
        worker=0,
        workers=1,
        host="host",
        process_id=0,
        incarnation="here",
        device="cpu",
        expected=expected,
        facts=facts,
    )
    return express(ExpressAdapterContext(WITHOUT_SESSION, facts, found, (worker,), swap))


def built(facts: EngineFacts, swap: Any = "two_slot", era: Any = WITHOUT_SESSION) -> Any:
    context = BuildRequestsContext(
        era, facts, Phase.ADAPTER, TransportName.INLINE, (), (), (), "counts", swap=swap
    )
    return plugin.weightlane_build_requests(context), plugin.weightlane_plan_lifecycle(context)


@pytest.mark.requirement("R30")
@pytest.mark.requirement("R31")
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("version", ERAS)
def test_the_payload_s_field_and_its_list_are_told_by_the_listed_fields(
    lora_facts: Callable[..., EngineFacts], version: str, tensor: int
) -> None:
    program, _ = built(lora_facts(fields=ERAS[version], tensor=tensor))
    one = "serialized_tensors" in ERAS[version]
    assert program.move.payload_field == ("serialized_tensors" if one else "serialized_named_tensors")
    assert program.move.copies == (0 if one else tensor)


@pytest.mark.requirement("R32")
@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("lora_name", "config_dict", "tensors_of_tomorrow"),
        ("lora_name", "serialized_named_tensors"),
        ("lora_name", "config_dict", "serialized_tensors", "serialized_named_tensors"),
    ],
)
def test_an_unknown_shape_is_refused_with_the_fields_that_were_found(
    lora_facts: Callable[..., EngineFacts], fields: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as refused:
        built(lora_facts(fields=fields))
    (problem,) = refused.value.problems
    assert problem.subject == LOAD_REQUEST
    assert all(field in problem.what for field in fields or ("none",))


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("copies", [0, 1, 2, 4])
def test_one_builder_makes_a_text_or_a_list_of_what_the_server_unpickles(copies: int) -> None:
    tensors = {"base_model.model.x.lora_A.weight": torch.arange(6.0).reshape(2, 3)}
    length, pieces = request_body(EncodedBucket(tensors), field="payload", copies=copies, body='{"a":1}')
    data = b"".join(pieces)
    assert len(data) == length
    told = json.loads(data)
    assert told["a"] == 1
    payloads = told["payload"] if copies else [told["payload"]]
    assert len(payloads) == (copies or 1)
    for payload in payloads:
        found = pickle.loads(base64.b64decode(payload))  # noqa: S301 - ours
        assert isinstance(found, dict)
        assert torch.equal(found["base_model.model.x.lora_A.weight"], tensors[next(iter(tensors))])


@pytest.mark.requirement("R22")
@pytest.mark.requirement("R26", part="towards SGLang")
def test_a_configuration_has_what_sglang_requires_and_a_concrete_list(
    lora_facts: Callable[..., EngineFacts],
) -> None:
    expression = expressed(lora_facts(), adapter(*QKV, DOWN))
    assert json.loads(expression.wire) == {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16.0,
        "target_modules": ["down_proj", "k_proj", "q_proj", "v_proj"],
    }
    assert expression.form == "as-trained"
    assert expression.carries == ()


@pytest.mark.parametrize("missing", [(QKV[0],), (QKV[1],), (QKV[2],), QKV[:2]])
def test_a_group_that_is_not_whole_travels_in_normal_form(
    lora_facts: Callable[..., EngineFacts], missing: tuple[str, ...]
) -> None:
    modules = [name for name in QKV if name not in missing]
    assert expressed(lora_facts(), adapter(*modules, DOWN)).form == "normal"


def test_gate_without_up_and_scales_of_modules_travel_in_normal_form(
    lora_facts: Callable[..., EngineFacts],
) -> None:
    assert expressed(lora_facts(), adapter(GATE)).form == "normal"
    own = adapter_of_modules("default", {DOWN: ModuleLora(8, 16.0), **{n: ModuleLora(4, 16.0) for n in QKV}})
    assert expressed(lora_facts(), own).form == "normal"


@pytest.mark.requirement("R29")
@pytest.mark.parametrize(
    "feature", ["bias", "modules_to_save", "use_dora", "target_parameters", "lora_bias", "rank_pattern"]
)
def test_what_sglang_ignores_is_refused_by_name_with_the_mode_that_carries_it(
    lora_facts: Callable[..., EngineFacts], feature: str
) -> None:
    expression = expressed(lora_facts(), adapter(DOWN))
    (problem,) = refused_features({feature: "there"}, expression.carries, receiver="SGLang")
    assert problem.subject == feature
    assert "merged" in problem.fix


@pytest.mark.parametrize(
    ("arguments", "swap", "subject", "words"),
    [
        ({"enable_lora": "false"}, "paused", "enable_lora", "started without LoRA"),
        ({"max_lora_rank": "4"}, "paused", "r", "launched for 4 at most"),
        ({"max_lora_rank": ""}, "paused", "max_lora_rank", "does not tell"),
        ({"lora_target_modules": ""}, "paused", "lora_target_modules", "does not tell"),
        ({"lora_target_modules": "o_proj gate_up_proj"}, "paused", "down_proj", "launched without LoRA on"),
        ({"max_loras_per_batch": "1"}, "two_slot", "max_loras_per_batch", "needs 2 adapters"),
        ({"max_loaded_loras": "1"}, "two_slot", "max_loaded_loras", "needs 2 adapters"),
    ],
)  # fmt: skip
def test_what_a_server_was_not_launched_for_is_refused_before_anything_is_sent(
    lora_facts: Callable[..., EngineFacts], arguments: dict[str, str], swap: str, subject: str, words: str
) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        expressed(lora_facts(**arguments), adapter(DOWN), swap)
    assert [problem.subject for problem in refused.value.problems] == [subject]


@pytest.mark.parametrize(
    "launched", ["all", "q_proj down_proj", "down_proj qkv_proj", "k_proj v_proj down_proj"]
)
def test_a_fused_module_is_served_as_soon_as_one_part_is_named(
    lora_facts: Callable[..., EngineFacts], launched: str
) -> None:
    assert expressed(lora_facts(lora_target_modules=launched), adapter(*QKV, DOWN)).swap == "two_slot"


@pytest.mark.parametrize(
    "module", ["lm_head", "model.embed_tokens", f"{LAYER}.mlp.experts.3.down_proj", "vision.proj"]
)
def test_modules_that_are_dropped_silently_or_not_shown_are_refused_by_name(
    lora_facts: Callable[..., EngineFacts], module: str
) -> None:
    with pytest.raises(PlanError) as refused:
        expressed(lora_facts(), adapter(DOWN, module))
    assert [problem.subject for problem in refused.value.problems] == [module]


@pytest.mark.parametrize(
    ("loader", "words"), [(LOADER, "live LoRA pool"), ("", "assumed: only that outputs")]
)
def test_the_plan_says_what_is_read_back_and_what_is_assumed(
    lora_facts: Callable[..., EngineFacts], loader: str, words: str
) -> None:
    expression = expressed(lora_facts(custom_weight_loader=loader), adapter(DOWN))
    assert any(words in note for note in expression.notes)


@pytest.mark.parametrize("era", [WITHOUT_SESSION, IN_SESSION], ids=["without", "in-session"])
def test_two_slots_hold_nothing_back_and_one_name_pauses_flushes_and_goes_on(
    lora_facts: Callable[..., EngineFacts], era: Any
) -> None:
    _, beside = built(lora_facts(), "two_slot", era)
    assert (beside.pause, beside.settle, beside.publish, beside.resume) == ((), (), (), ())
    assert beside.requests == "drain"
    _, paused = built(lora_facts(), "paused", era)
    assert [call.route for call in paused.pause] == ["/pause_generation"]
    assert [call.route for call in paused.settle] == ["/flush_cache?timeout=30"]
    assert [call.route for call in paused.resume] == ["/continue_generation"]
    assert paused.requests == "abort"


def test_parts_of_fused_modules_are_in_the_order_of_their_rows() -> None:
    assert [fused_module(name) for name in (*QKV, DOWN)] == [
        *((f"{LAYER}.self_attn.qkv_proj", number) for number in range(3)),
        (DOWN, 0),
    ]


@pytest.mark.requirement("R23")
@pytest.mark.requirement("R27", part="SGLang's launch")
@pytest.mark.parametrize(("swap", "slots"), [("two_slot", "3"), ("paused", "2")])
@pytest.mark.parametrize(("rank", "launched"), [(0, "16"), (33, "33")])
def test_the_launch_has_the_rank_and_places_for_the_policy_and_for_requests_without_an_adapter(
    lora_facts: Callable[..., EngineFacts], swap: Any, slots: str, rank: int, launched: str
) -> None:
    import msgspec

    facts = msgspec.structs.replace(lora_facts(), source="installed", device="cpu")
    plan = plugin.weightlane_plan_launch(
        LaunchContext(WITHOUT_SESSION, facts, Mode.ADAPTER, "/model", swap=swap, lora_rank=rank)
    )
    words = list(plan.arguments)
    told = {option: words[words.index(option) + 1] for option in words if option.startswith("--")
            and words.index(option) + 1 < len(words)}  # fmt: skip
    assert "--enable-lora" in words
    assert told["--max-lora-rank"] == launched
    assert told["--lora-target-modules"] == "all"
    assert told["--max-loras-per-batch"] == slots
    assert any("no" in note and "--lora-rank" in note for note in plan.notes) is (rank == 0)


def test_without_adapters_a_server_is_launched_without_lora(lora_facts: Callable[..., EngineFacts]) -> None:
    plan = plugin.weightlane_plan_launch(LaunchContext(WITHOUT_SESSION, lora_facts(), Mode.FULL, "/model"))
    assert "--enable-lora" not in plan.arguments
