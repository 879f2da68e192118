"""Mode adapter into a fake server that holds adapters by name: which requests it gets, in which order."""

from __future__ import annotations

import base64
import json
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightlane as wl
from weightlane.errors import EngineDeadError, EngineError, PlanError, SyncError, VerificationError
from weightlane_sglang.adapter_contract import LOAD_ROUTE, MODELS_ROUTE, UNLOAD_ROUTE
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    GENERATE_ROUTE,
    PAUSE_ROUTE,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)
from weightlane_sglang.loader_name import LOADER
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLUSH = "/flush_cache?timeout=30"
BASE = [PAUSE_ROUTE, UPDATE_ROUTE, FLUSH]
BASE_PUBLISHED = [VERSION_ROUTE, CONTINUE_ROUTE]


class FakeAdapterServer:
    """Holds names as SGLang does: a second load of one is refused, and so is an unload of none."""

    def __init__(self, fake: Any, answer: Any, folder: Path) -> None:
        self.fake, self.answer = fake, answer
        self.loaded: list[str] = []
        self.bound_to_nothing = False
        self.noise = 0.0
        self._generated = 0
        openapi = fake.answers["/openapi.json"].body
        for route in (LOAD_ROUTE, UNLOAD_ROUTE, MODELS_ROUTE):
            openapi["paths"][route] = {"post": {}}
        fields = ("lora_name", "config_dict", "serialized_named_tensors", "load_format")
        openapi["components"]["schemas"]["LoadLoRAAdapterFromTensorsReqInput"] = {
            "properties": {field: {} for field in fields}
        }
        openapi["components"]["schemas"]["UnloadLoRAAdapterReqInput"] = {"properties": {"lora_name": {}}}
        info = fake.answers["/server_info"].body
        info |= {
            "enable_lora": True,
            "max_lora_rank": 8,
            "lora_target_modules": ["all"],
            "max_loras_per_batch": 3,
            "max_loaded_loras": None,
        }
        model = {
            "model_path": str(folder),
            "weight_version": "default",
            "architectures": ["Qwen3ForCausalLM"],
        }
        fake.answers |= {
            "/model_info": answer(model),
            **dict.fromkeys((PAUSE_ROUTE, UPDATE_ROUTE, FLUSH, CONTINUE_ROUTE), answer({"success": True})),
            VERSION_ROUTE: answer(self._publish),
            LOAD_ROUTE: answer(self._load),
            UNLOAD_ROUTE: answer(self._unload),
            GENERATE_ROUTE: answer(self._generate),
        }
        self._list()

    def asked(self) -> list[str]:
        """What a sync asked for, buckets of the base as one, the canary left out."""
        routes = [
            route for method, route, _ in self.fake.requests if method == "POST" and route != GENERATE_ROUTE
        ]
        return [
            route for place, route in enumerate(routes) if route != UPDATE_ROUTE or routes[place - 1] != route
        ]

    def names(self, route: str) -> list[str]:
        return [body["lora_name"] for body in self.fake.bodies(route)]

    def load_beside(self, name: str) -> None:
        """An adapter that no lane loaded."""
        self.loaded.append(name)
        self._list()

    def tell_version(self, version: str) -> None:
        """What it says from now on that its weights are."""
        self.fake.answers["/model_info"].body["weight_version"] = version

    def _publish(self, body: bytes) -> Any:
        self.tell_version(json.loads(body)["new_version"])
        return {"success": True}

    def _list(self) -> None:
        cards = [
            {"id": "the-model", "parent": None},
            *({"id": n, "parent": "the-model"} for n in self.loaded),
        ]
        self.fake.answers[MODELS_ROUTE] = self.answer({"data": cards})

    def _load(self, body: bytes) -> Any:
        name = json.loads(body)["lora_name"]
        if name in self.loaded:
            return {"success": False, "error_message": f"{name} is already loaded"}
        self.loaded.append(name)
        self._list()
        return {"success": True, "loaded_adapters": dict.fromkeys(self.loaded, "__tensor__")}

    def _unload(self, body: bytes) -> Any:
        name = json.loads(body)["lora_name"]
        if name not in self.loaded:
            return {"success": False, "error_message": f"LoRA with name {name} does not exist"}
        self.loaded.remove(name)
        self._list()
        return {"success": True}

    def _generate(self, body: bytes) -> Any:
        adapted = "lora_path" in json.loads(body) and not self.bound_to_nothing
        self._generated += 1
        logprob = (-2.0 if adapted else -1.0) + self._generated * self.noise
        return {"meta_info": {"input_token_logprobs": [[None, 1, None], [logprob, 2, None]]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=16, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture
def server(fake_server: Any, answer: Any, folder: Path) -> FakeAdapterServer:
    return FakeAdapterServer(fake_server, answer, folder)


@pytest.fixture
def lane_to(folder: Path) -> Callable[..., Any]:
    """Opens a lane from peft's own model; `fields` are of its configuration."""

    def open_one(server: FakeAdapterServer, swap: str = "two_slot", **fields: Any) -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            config = LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": "all-linear", **fields})
            model = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.add_(0.5)
        lane = wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=[wl.rollout("sglang", url=server.fake.url)],
            mode="adapter",
            swap=swap,
            bucket_bytes=256,
        )
        server.fake.requests.clear()
        return lane

    return open_one


@pytest.mark.requirement("R81")
@pytest.mark.requirement("R36")
@pytest.mark.requirement("R38")
def test_two_slots_load_beside_what_serves_and_unload_it_once_the_new_one_is_published(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        assert server.asked() == [*BASE, LOAD_ROUTE, *BASE_PUBLISHED]
        server.fake.requests.clear()
        lane.stage(version=2)
        assert server.asked() == [LOAD_ROUTE]
        assert server.loaded == ["default@1", "default@2"]
        assert lane.adapter_ref().name == "default@1"
        lane.commit()
        assert server.asked() == [LOAD_ROUTE, UNLOAD_ROUTE]
        assert (server.loaded, lane.adapter_ref().name) == (["default@2"], "default@2")


@pytest.mark.requirement("R82")
def test_under_one_name_the_old_one_goes_first_and_the_cache_is_flushed_before_generation_goes_on(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server, "paused") as lane:
        lane.sync(version=1)
        server.fake.requests.clear()
        lane.sync(version=2)
        assert server.asked() == [PAUSE_ROUTE, UNLOAD_ROUTE, LOAD_ROUTE, FLUSH, VERSION_ROUTE, CONTINUE_ROUTE]
        assert (server.loaded, lane.adapter_ref().name) == (["default"], "default")


@pytest.mark.requirement("R82")
def test_a_flush_that_fails_is_an_error_and_generation_stays_held(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server, "paused") as lane:
        lane.sync(version=1)
        server.fake.requests.clear()
        server.fake.answers[FLUSH] = answer({"success": False, "message": "requests are running"})
        with pytest.raises(EngineError, match="requests are running"):
            lane.sync(version=2)
        assert CONTINUE_ROUTE not in server.asked()


def test_one_request_has_the_whole_adapter_once_per_rank_and_no_field_beyond_the_listed(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        assert len(lane.plan().buckets) > 2
        lane.sync(version=1)
        (body,) = server.fake.bodies(LOAD_ROUTE)
        assert set(body) == {"lora_name", "config_dict", "serialized_named_tensors"}
        assert len(body["serialized_named_tensors"]) == 2, "the fake says TP 2"
        tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))  # noqa: S301 - ours
        assert list(tensors) == [item.name for item in lane.plan().tensors]
        assert body["config_dict"]["r"] == 2


def test_what_sglang_ignores_is_folded_and_siblings_are_filled_with_zeros(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    fields = {"target_modules": ["k_proj"], "use_rslora": True, "rank_pattern": {"k_proj": 4}}
    with lane_to(server, **fields) as lane:
        lane.sync(version=1)
    (body,) = server.fake.bodies(LOAD_ROUTE)
    assert body["config_dict"] == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4.0,
        "target_modules": ["k_proj", "q_proj", "v_proj"],
    }
    tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))  # noqa: S301 - ours
    trained = [name for name, tensor in tensors.items() if tensor.count_nonzero()]
    assert {name.split(".")[-3] for name in trained} == {"k_proj"}
    b = next(tensors[name] for name in trained if ".lora_B." in name)
    assert torch.allclose(b, torch.full_like(b, 0.5 * 4 / 4**0.5)), "alpha over the root of the rank"


@pytest.mark.requirement("R35")
def test_a_refused_load_tells_the_server_s_words_and_leaves_what_serves(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        good = server.fake.answers[LOAD_ROUTE]
        server.fake.answers[LOAD_ROUTE] = answer({"error_message": "rank 32 is incompatible"}, status=400)
        with pytest.raises(EngineError, match="rank 32 is incompatible"):
            lane.sync(version=2)
        assert (server.loaded, lane.adapter_ref().name) == (["default@1"], "default@1")
        server.fake.answers[LOAD_ROUTE] = good
        lane.sync(version=3)
        assert server.loaded == ["default@3"]


def test_a_server_that_dies_of_a_load_is_told_as_dead_with_the_request_before(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server) as lane:
        server.fake.answers[LOAD_ROUTE] = answer(hang_up=True)
        with pytest.raises(EngineDeadError, match=rf"during POST {LOAD_ROUTE}.*GET {MODELS_ROUTE}"):
            lane.sync(version=1)


def test_an_adapter_that_is_bound_to_nothing_is_taken_out_again(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        server.bound_to_nothing = True
        with pytest.raises(VerificationError, match="exactly as with the base"):
            lane.sync(version=2)
        assert (server.loaded, lane.adapter_ref().name) == (["default@1"], "default@1")


@pytest.mark.parametrize(
    ("noise", "bound", "told"),
    [
        (1e-5, True, "outputs with it differ from the base's, log-probs by up to 1, and the base's from"),
        (1e-5, False, "outputs tell nothing: log-probs with it differ"),
        (0.5, True, "outputs tell nothing"),
    ],
)
def test_outputs_that_vary_by_themselves_are_no_sign_that_an_adapter_is_bound(
    server: FakeAdapterServer, lane_to: Callable[..., Any], noise: float, bound: bool, told: str
) -> None:
    """As on a GPU beside other requests; without a second look at the base each of them passes for bound."""
    with lane_to(server) as lane:
        lane.sync(version=1)
        server.noise, server.bound_to_nothing = noise, not bound
        assert told in lane.sync(version=2).replicas[0].verified


def test_where_nobody_looks_into_the_server_the_report_says_what_was_compared_instead(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        assert "assumed: only that outputs" in str(lane.plan())
        told = lane.sync(version=1).replicas[0].verified
        # The base came with it, so that nothing could generate before it was published.
        assert "not read back" in told
        assert "outputs were not compared" in told
        told = lane.sync(version=2).replicas[0].verified
        assert "log-probs by up to 1" in told


def test_a_server_that_lists_others_than_it_says_it_loaded_is_an_error(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server) as lane:
        server.fake.answers[LOAD_ROUTE] = answer({"success": True, "loaded_adapters": {"other": "x"}})
        with pytest.raises(EngineError, match="does not list it"):
            lane.sync(version=1)


def test_a_staged_adapter_that_is_never_published_goes_with_the_next_sync(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        lane.stage(version=2)
        lane.sync(version=3)
        assert server.loaded == ["default@3"]
        lane.stage(version=4)
    assert server.loaded == ["default@3"], "also where the lane is closed"


def test_versions_that_a_trainer_before_has_left_go_and_other_adapters_stay(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    server.loaded += ["default@1", "default@7", "default", "default@x", "other@3"]
    server._list()
    with lane_to(server) as lane:
        lane.sync(version=1)
        assert server.names(UNLOAD_ROUTE)[0] == "default@1", "the very name goes first, and its cache with it"
        asked = server.asked()
        assert asked[asked.index(UNLOAD_ROUTE) :][:3] == [UNLOAD_ROUTE, FLUSH, LOAD_ROUTE]
        assert sorted(server.loaded) == ["default@1", "default@x", "other@3"]


def test_an_adapter_that_somebody_else_loads_under_this_lane_s_name_is_told_and_left_alone(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        server.load_beside("default@8")
        with pytest.raises(SyncError, match=r"Somebody else loaded default@8.*a name of its own"):
            lane.sync(version=2)
        assert server.loaded == ["default@1", "default@8"]
        assert lane.adapter_ref().name == "default@1"


def test_of_two_lanes_that_give_their_adapters_one_name_the_second_is_told_at_once_and_refused_later(
    server: FakeAdapterServer, lane_to: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with lane_to(server) as first, lane_to(server) as second:
        first.sync(version=1)
        assert "did not load" not in caplog.text
        second.sync(version=1)
        assert "holds default@1, which this lane did not load" in caplog.text
        first.sync(version=2)
        with pytest.raises(SyncError, match="Somebody else loaded default@2"):
            second.sync(version=2)
        assert server.loaded == ["default@2"], "the first one's"


def test_of_two_lanes_under_one_name_that_never_changes_each_report_tells_of_the_other(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server, "paused") as first, lane_to(server, "paused") as second:
        first.sync(version=1)
        second.sync(version=7)
        for lane, version in ((first, 2), (second, 8)):
            assert "somebody else wrote its weights" in lane.sync(version=version).phases[0].why[0]


def test_a_load_that_came_after_its_bound_is_no_other_s(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        good = server.fake.answers[LOAD_ROUTE]
        server.fake.answers[LOAD_ROUTE] = answer({"error_message": "late"}, status=500)
        with pytest.raises(EngineError, match="late"):
            lane.sync(version=2)
        server.load_beside("default@2")
        server.fake.answers[LOAD_ROUTE] = good
        lane.sync(version=3)
        assert server.loaded == ["default@3"]


def test_a_server_that_does_not_go_on_after_a_look_is_told_to_stand_still(
    server: FakeAdapterServer,
    lane_to: Callable[..., Any],
    answer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    server.fake.answers["/server_info"].body["custom_weight_loader"] = [LOADER]
    with lane_to(server) as lane:
        lane.sync(version=1)
        server.fake.answers[CONTINUE_ROUTE] = answer({"error": "not now"}, status=500)
        with pytest.raises(EngineError, match=rf"{CONTINUE_ROUTE}.*not now.*Requests stand still there"):
            lane.sync(version=2)
        assert server.loaded == ["default@1"]


def test_a_version_left_by_another_that_is_gone_by_the_commit_does_not_take_the_new_one_along(
    server: FakeAdapterServer, lane_to: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server.load_beside("default@7")
    with lane_to(server) as lane:
        lane.stage(version=8)
        server.loaded.remove("default@7")
        server._list()
        lane.commit()
        assert (server.loaded, lane.adapter_ref().name) == (["default@8"], "default@8")
        assert "default@7 does not exist" in caplog.text


def test_a_version_that_serves_is_not_loaded_in_its_own_place(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        with pytest.raises(SyncError, match="default@1 is loaded"):
            lane.sync(version=1)
        assert server.loaded == ["default@1"]


def test_a_server_without_room_is_told_before_it_unloads_somebody_else_s(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    server.fake.answers["/server_info"].body["max_loaded_loras"] = 2
    server.loaded += ["a", "b"]
    server._list()
    with lane_to(server) as lane:
        with pytest.raises(EngineError, match="started for 2 adapters, holds a, b"):
            lane.sync(version=1)
        assert server.names(LOAD_ROUTE) == []


def test_what_a_trainer_before_has_left_makes_room_where_there_is_none(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    server.fake.answers["/server_info"].body["max_loaded_loras"] = 2
    server.loaded += ["default@6", "other@1"]
    server._list()
    with lane_to(server) as lane:
        lane.sync(version=1)
        assert server.loaded == ["other@1", "default@1"]


def test_a_request_without_a_name_is_refused_once_an_adapter_serves(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        with pytest.raises(EngineError, match="serves default@1"):
            lane.replicas[0].generate([[1]], max_tokens=1)


@pytest.mark.requirement("R29")
@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 16}, "r"),
    ],
)
def test_what_the_server_would_ignore_or_refuse_is_a_problem_of_the_plan(
    server: FakeAdapterServer, lane_to: Callable[..., Any], fields: dict[str, Any], subject: str
) -> None:
    with pytest.raises(PlanError) as refused:
        lane_to(server, **fields)
    assert subject in {problem.subject for problem in refused.value.problems}
    assert server.names(LOAD_ROUTE) == []


@pytest.mark.requirement("R81")
def test_a_server_that_was_started_anew_is_sent_the_base_again(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        server.loaded.clear()
        server._list()
        server.fake.answers["/server_info"].body["startup_time"] = {"load_weight": 0.5}
        server.fake.requests.clear()
        report = lane.sync(version=2)
        assert report.rejoined == (0,)
        assert server.asked() == [*BASE, LOAD_ROUTE, *BASE_PUBLISHED]
        assert server.loaded == ["default@2"]


@pytest.mark.parametrize("swap", ["two_slot", "paused"])
def test_a_base_is_sent_again_where_somebody_else_published_over_it(
    server: FakeAdapterServer, lane_to: Callable[..., Any], swap: str
) -> None:
    """Another lane, or a new start that nothing else shows: the adapter would answer over other weights."""
    with lane_to(server, swap) as lane:
        for version in (1, 2, 3):
            lane.sync(version=version)
        assert server.asked().count(UPDATE_ROUTE) == 1, "what this lane publishes is no such case"
        server.tell_version("9" if swap == "two_slot" else "default")
        server.fake.requests.clear()
        report = lane.sync(version=4)
        assert server.asked()[: len(BASE)] == BASE
        assert "somebody else wrote its weights" in report.phases[0].why[0]
        server.fake.requests.clear()
        lane.sync(version=5)
        assert UPDATE_ROUTE not in server.asked()


def test_a_staged_version_is_not_published_where_somebody_else_published_meanwhile(
    server: FakeAdapterServer, lane_to: Callable[..., Any]
) -> None:
    with lane_to(server) as lane:
        lane.sync(version=1)
        lane.stage(version=2)
        server.tell_version("9")
        with pytest.raises(SyncError, match="somebody else published"):
            lane.commit()
        assert lane.adapter_ref().name == "default@1"


def test_a_base_that_failed_is_sent_again_and_the_server_stays_paused_until_then(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server) as lane:
        server.fake.answers[FLUSH] = answer({"success": False, "message": "not idle"})
        with pytest.raises(EngineError, match="not idle"):
            lane.sync(version=1)
        assert server.asked() == BASE
        server.fake.answers[FLUSH] = answer({"success": True})
        good = server.fake.answers[LOAD_ROUTE]
        server.fake.answers[LOAD_ROUTE] = answer({"error_message": "no"}, status=400)
        server.fake.requests.clear()
        with pytest.raises(EngineError, match="no"):
            lane.sync(version=2)
        assert server.asked() == [UPDATE_ROUTE, FLUSH, LOAD_ROUTE], "paused still, and not let go"
        server.fake.answers[LOAD_ROUTE] = good
        server.fake.requests.clear()
        lane.sync(version=3)
        assert server.asked() == [UPDATE_ROUTE, FLUSH, LOAD_ROUTE, *BASE_PUBLISHED]


@pytest.mark.parametrize("swap", ["two_slot", "paused"])
def test_generation_goes_on_where_a_sync_failed_before_it_touched_what_serves(
    server: FakeAdapterServer, lane_to: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    from weightlane.transports.inline import AdapterRequestSink

    with lane_to(server, swap) as lane:
        lane.sync(version=1)
        server.fake.requests.clear()
        with monkeypatch.context() as patch:
            patch.setattr(AdapterRequestSink, "finish", lambda self: 1 / 0)
            with pytest.raises(SyncError, match="division"):
                lane.sync(version=2)
        held = [] if swap == "two_slot" else [PAUSE_ROUTE, CONTINUE_ROUTE]
        assert server.asked() == held
        lane.sync(version=3)
        assert server.loaded == ["default@3" if swap == "two_slot" else "default"]


def test_one_that_was_taken_out_under_its_name_leaves_the_server_held_until_a_sync_succeeds(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any
) -> None:
    with lane_to(server, "paused") as lane:
        lane.sync(version=1)
        good = server.fake.answers[LOAD_ROUTE]
        server.fake.answers[LOAD_ROUTE] = answer({"error_message": "no"}, status=400)
        server.fake.requests.clear()
        with pytest.raises(EngineError, match="no"):
            lane.sync(version=2)
        assert server.asked() == [PAUSE_ROUTE, UNLOAD_ROUTE, LOAD_ROUTE]
        server.fake.answers[LOAD_ROUTE] = good
        lane.sync(version=3)
        assert server.asked()[-2:] == [VERSION_ROUTE, CONTINUE_ROUTE]


def test_requests_that_run_with_the_old_one_hold_up_the_next_load_alone(
    server: FakeAdapterServer, lane_to: Callable[..., Any], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec.structs import replace

    monkeypatch.setattr("weightlane_sglang.adapter_shelf._GRACE_SECONDS", 0.1)
    with lane_to(server) as lane:
        lane.sync(version=1)
        slow = server.fake.answers[UNLOAD_ROUTE] = answer(server._unload, after_seconds=30.0)
        lane.sync(version=2)
        assert lane.adapter_ref().name == "default@2", "published, though requests still run with the old one"
        shelf: Any = lane.replicas[0]._adapters
        move = replace(lane.plan().replicas[0].program.move, timeout_seconds=0.1)
        with pytest.raises(SyncError, match="still run"):
            shelf._await_unloads(move.timeout_seconds)
        server.fake.released.set()
        assert slow.after_seconds
        lane.sync(version=3)
        assert server.loaded == ["default@3"]
