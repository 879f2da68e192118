"""An `LLM` object of the trainer's own process as the rollout: `wl.rollout("vllm", engine=llm)`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from weightlane_vllm.launch import FrontStart, front_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parent / "programs/sync_own_llm.py"


@pytest.mark.parametrize(
    ("older", "multiprocessing", "lora", "transports"),
    [
        (False, "0", "on", ("inprocess",)),
        (False, "1", "off", ("shm", "inline")),
        (True, "0", "on", ("inprocess",)),
    ],
    ids=["0.32-lora", "0.32", "0.27.1-lora"],
)
def test_an_engine_handle_is_synced_in_place(
    vllm_python: Path,
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path: Path,
    older: bool,
    multiprocessing: str,
    lora: str,
    transports: tuple[str, ...],
) -> None:
    environment = {
        **os.environ,
        **front_environment(FrontStart(str(tiny_folder), "", "cpu")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
    }
    if older:
        before = str(request.getfixturevalue("vllm_older"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
    finished = subprocess.run(
        [str(vllm_python), str(PROGRAM), str(tiny_folder), str(tmp_path / "answer"), lora, *transports],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    seen = json.loads((tmp_path / "answer").read_text())
    assert seen["alive"]
    assert [(sync["transport"], sync["version"]) for sync in seen["syncs"]] == [
        (transport, version) for transport in transports for version in (1, 2)
    ]
    for sync in seen["syncs"]:
        assert sync["era"] == ("base-layer-names" if older else "lora-load-weights")
        assert sync["coverage"] == "proven"
        assert sync["moved"]
        assert sync["same_tokens"]
        assert sync["distance"] <= 1e-4
