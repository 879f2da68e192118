"""Facts from a server's own description, and from an installed package that is never imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.contexts import FactsContext, RolloutTarget
from weightlane.errors import EngineError
from weightlane.probes import Viable
from weightlane_sglang import plugin
from weightlane_sglang.contract import ENCODES
from weightlane_sglang.http_channel import HttpChannel
from weightlane_sglang.installed import installed_facts, read_sources
from weightlane_sglang.openapi import read_openapi
from weightlane_sglang.probes import probe_updates_without_session
from weightlane_sglang.server_facts import read_facts, read_incarnation, version_number

if TYPE_CHECKING:
    from pathlib import Path

STRUCTS = """
import torch_that_must_not_be_imported

class BaseReq(Struct):
    rid: str | None = None

class UpdateWeightsFromTensorReqInput(BaseReq, kw_only=True):
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False

class PauseGenerationReqInput(BaseReq):
    mode: str = "abort"

class UpdateWeightVersionReqInput(BaseReq):
    new_version: str
    abort_all_requests: bool = True
"""


def server_source(routes: tuple[str, ...]) -> str:
    functions = [
        f'@app.post("{route}")\nasync def f{number}(obj, request): ...' for number, route in enumerate(routes)
    ]
    functions.append(
        '@app.api_route("/flush_cache", methods=["GET"])\n@auth(1)\nasync def flush(timeout: float = 0): ...'
    )
    return "\n\n".join(functions)


def test_a_live_server_describes_itself(fake_server: Any) -> None:
    facts = plugin.weightlane_collect_facts(
        FactsContext("sglang", ("sglang",), RolloutTarget("sglang", address=fake_server.url))
    )
    assert facts.version == "0.5.18"
    assert facts.source == "server"
    assert facts.parallel.tensor == 2
    assert facts.request_fields["/flush_cache"] == ("timeout",)
    assert facts.launch_arguments == {
        "dtype": "float32", "enable_dp_attention": "false", "weight_cache_mode": "off",
    }  # fmt: skip
    assert isinstance(probe_updates_without_session(facts), Viable)


@pytest.mark.parametrize("address", ["unix:/tmp/x", "tcp:host:1", ""])
def test_targets_of_other_kinds_are_left_to_other_plugins(address: str) -> None:
    target = RolloutTarget("sglang", address=address)
    assert plugin.weightlane_collect_facts(FactsContext("sglang", ("sglang",), target)) is None


def test_arguments_that_decide_a_refusal_are_read(fake_server: Any, answer: Any) -> None:
    told = fake_server.answers["/server_info"].body
    deciding = {"enable_lora": True, "hicache_storage_backend": "file", "enable_lmcache": True}
    fake_server.answers["/server_info"] = answer({**told, **deciding, "enable_flexkv": False})
    with HttpChannel(fake_server.url) as channel:
        arguments = read_facts(channel, timeout_seconds=5).launch_arguments
    assert {name: arguments[name] for name in (*deciding, "enable_flexkv")} == {
        "enable_lora": "true",
        "hicache_storage_backend": "file",
        "enable_lmcache": "true",
        "enable_flexkv": "false",
    }


def test_other_engines_are_left_alone() -> None:
    assert plugin.weightlane_collect_facts(FactsContext("vllm", ("vllm",))) is None


def test_an_address_that_is_no_sglang_server_is_told_by_its_routes(fake_server: Any, answer: Any) -> None:
    fake_server.answers["/openapi.json"] = answer({"paths": {"/v1/models": {"get": {}}}})
    with HttpChannel(fake_server.url) as channel, pytest.raises(EngineError, match=r"/v1/models") as caught:
        read_facts(channel, timeout_seconds=5)
    assert "/model_info" in str(caught.value)


@pytest.mark.parametrize("document", [b"<html>", b"[]", b'{"paths": 3}', b'{"info": {}}'])
def test_a_document_of_another_shape_is_a_typed_error(document: bytes) -> None:
    with pytest.raises(EngineError, match="not an OpenAPI description"):
        read_openapi(document)


def test_sources_are_read_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "sglang/srt/managers").mkdir(parents=True)
    (tmp_path / "sglang/srt/entrypoints").mkdir(parents=True)
    (tmp_path / "sglang/srt/managers/io_struct.py").write_text(STRUCTS)
    routes = ("/update_weights_from_tensor", "/begin_weight_update")
    (tmp_path / "sglang/srt/entrypoints/http_server.py").write_text(server_source(routes))
    found_routes, fields = read_sources(tmp_path)
    assert set(found_routes) == {*routes, "/flush_cache"}
    assert fields["UpdateWeightsFromTensorReqInput"][:2] == ("rid", "serialized_named_tensors")
    assert fields["/flush_cache"] == ("timeout",)
    assert "torch_that_must_not_be_imported" not in sys.modules
    info = tmp_path / "sglang-0.5.18.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.18\n")
    facts = installed_facts(("sglang",), [str(tmp_path)])
    assert facts is not None
    assert (facts.version, facts.request_fields, set(facts.routes)) == ("0.5.18", fields, set(found_routes))


def test_an_absent_distribution_gives_no_facts() -> None:
    assert installed_facts(("a-distribution-that-is-nowhere",)) is None


def test_the_incarnation_is_stable_and_changes_with_a_restart(fake_server: Any, answer: Any) -> None:
    with HttpChannel(fake_server.url) as channel:
        first = read_incarnation(channel, timeout_seconds=5)
        assert read_incarnation(channel, timeout_seconds=5) == first
        restarted = {
            **fake_server.answers["/server_info"].body,
            "startup_time": {"load_weight": 0.0664867509999},
        }
        fake_server.answers["/server_info"] = answer(restarted)
        assert read_incarnation(channel, timeout_seconds=5) != first
        old = {**restarted, "startup_time": None}
        fake_server.answers["/server_info"] = answer(old)
        by_seed = read_incarnation(channel, timeout_seconds=5)
        fake_server.answers["/server_info"] = answer({**old, "random_seed": 8})
        assert read_incarnation(channel, timeout_seconds=5) != by_seed, "older servers: their seed tells"
        fake_server.answers["/server_info"] = answer({**old, "random_seed": None})
        with pytest.raises(EngineError, match="startup_time"):
            read_incarnation(channel, timeout_seconds=5)


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("default", None), ("v7", None), ("", None), (None, None)]
)
def test_only_a_version_that_a_lane_published_is_a_number(text: str | None, number: int | None) -> None:
    assert version_number(text) == number


@pytest.mark.parametrize("told", ["has_image_understanding", "has_audio_understanding"])
def test_a_model_with_encoders_is_known_by_what_the_server_tells(
    fake_server: Any, answer: Any, told: str
) -> None:
    fake_server.answers["/model_info"] = answer({"model_path": "/m", told: True})
    with HttpChannel(fake_server.url) as channel:
        assert read_facts(channel, timeout_seconds=5).attributes[ENCODES]
    fake_server.answers["/model_info"] = answer({"model_path": "/m", told: False})
    with HttpChannel(fake_server.url) as channel:
        assert not read_facts(channel, timeout_seconds=5).attributes[ENCODES]
