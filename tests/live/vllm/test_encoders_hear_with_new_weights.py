"""What vLLM's encoder cache holds is of old weights until it is reset, and our calls reset it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from weightlane_vllm.launch import FrontStart, front_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.long_run]

PROGRAM = Path(__file__).parent / "programs/encoders_of_own_llm.py"
AGREES, MOVED = 1e-4, 1e-2


@pytest.fixture(scope="module", params=["0.32", "0.27.1"])
def seen(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("encoder")
    environment = {
        **os.environ,
        **front_environment(FrontStart("", "", "cpu")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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
    return told


def test_the_model_is_one_that_encodes_and_is_heard_as_by_transformers(seen: dict[str, Any]) -> None:
    assert seen["encodes"], "so that a plan has the reset"
    assert seen["sound_tokens"] > 1
    assert seen["before"] <= AGREES


def test_a_reset_of_the_prefix_cache_alone_leaves_what_old_weights_heard(seen: dict[str, Any]) -> None:
    """The control: an `LLM` of a multimodal model was synced so before."""
    for update in seen["updates"]:
        assert update["moved"] >= MOVED
        assert update["prefix_cache_alone"] >= MOVED


def test_with_the_reset_of_the_encoder_cache_the_new_weights_hear(seen: dict[str, Any]) -> None:
    for update in seen["updates"]:
        assert update["told"] == "reset"
        assert update["both"] <= AGREES
