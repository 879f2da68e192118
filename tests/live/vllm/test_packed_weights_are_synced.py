"""An `LLM` whose linear weights stay packed, with LoRA on: by lanes, and by vLLM's own weight transfer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from weightlane_vllm.launch import FrontStart, front_environment
from weightlane_vllm.patches import CPU_WEIGHTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parent / "programs/sync_packed_llm.py"


@pytest.fixture(
    scope="module",
    params=["0.32", pytest.param("0.27.1", marks=pytest.mark.long_run)],  # its layers are in every run
)
def seen(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("packed")
    environment = {
        **os.environ,
        **front_environment(FrontStart("", "", "cpu")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        CPU_WEIGHTS: "packed",
    }
    if request.param == "0.27.1":
        before = str(request.getfixturevalue("vllm_older"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
    words = [str(vllm_python), str(PROGRAM), str(folder), str(folder / "answer")]
    finished = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    told: dict[str, Any] = json.loads((folder / "answer").read_text())
    assert told["packed"] > 0, "else nothing is shown"
    return {"era": request.param, **told}


def equal_and_moved(update: dict[str, Any]) -> bool:
    return bool(update["distance"] <= 1e-4 and update["moved"] >= 1e-2)


def test_a_lane_brings_every_weight_by_the_engines_reload(seen: dict[str, Any]) -> None:
    full = seen["full"]
    assert full["coverage"] == "proven"
    assert full["buckets"] > 4, "so that layers are collected from several"
    assert all(map(equal_and_moved, full["syncs"]))
    compared, not_comparable = full["compared"]
    assert compared > 0
    assert not_comparable > 0, "what was packed is told, not passed over"


def test_a_sync_that_fails_in_the_middle_leaves_a_worker_that_does_not_serve(seen: dict[str, Any]) -> None:
    full = seen["full"]
    assert "in the middle" in full["failed"]
    assert full["not_servable"].startswith("NotServableError")
    assert "in the middle" in full["not_servable"]
    assert equal_and_moved(full["next"])


def test_adapters_come_after_a_base_that_was_reloaded(seen: dict[str, Any]) -> None:
    first, second = seen["adapter"]["syncs"]
    assert (first["phases"], second["phases"]) == (["base", "adapter"], ["adapter"])
    for sync in (first, second):
        assert sync["moved"]
        assert sync["distance"] <= 1e-4
        assert sync["through_us"] <= 1e-4
        assert sync["held"] == 1
    assert seen["full"]["listed"] == []


def test_an_adapter_that_the_engine_drops_is_loaded_again(seen: dict[str, Any]) -> None:
    adapter = seen["adapter"]
    assert adapter["base_as_before"] <= 1e-4
    # An update of vLLM's own drops every adapter since 0.28.
    assert adapter["listed_after_update"] == (0 if seen["era"] == "0.32" else 1)
    assert adapter["listed_when_asked"] == 1
    assert adapter["served_again"] <= 1e-4


def test_vllms_own_weight_transfer_is_carried_by_our_backend(seen: dict[str, Any]) -> None:
    native = seen["native"]
    assert all(map(equal_and_moved, native["updates"]))
    assert native.get("version", "2") == "2"
    assert equal_and_moved(native["afterwards"])


def test_our_backend_refuses_what_a_lane_would(seen: dict[str, Any]) -> None:
    native = seen["native"]
    assert "Nothing was announced" in native["not_announced"]
    assert "norm.weight" in native["incomplete"]
    assert "is not what was sent" in native["wrong_digest"]
    assert "closed" in native["closed"]
