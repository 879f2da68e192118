"""An `sgl.Engine` of the trainer's own process as the rollout: `wl.rollout("sglang", engine=engine)`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from weightlane_sglang.adapter_launch import lora_arguments
from weightlane_sglang.launch import server_arguments, server_environment
from weightlane_sglang.loader_name import LOADER_ARGUMENTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parent / "programs/sync_own_engine.py"
EVERY_WAY = ("full", "two_slot", "merged", "paused", "collective", "release")
ADAPTER_WAYS = ("two_slot", "paused")


@pytest.mark.parametrize(
    ("newer", "ways"),
    [
        (False, ("full", "two_slot")),
        pytest.param(False, EVERY_WAY, marks=pytest.mark.long_run),
        pytest.param(True, EVERY_WAY, marks=pytest.mark.long_run),
    ],
    ids=["0.5.18", "0.5.18-every-way", "0.5.23-every-way"],
)
def test_an_engine_of_this_process_matches_its_trainer_after_each_sync(
    sglang_python: Path,
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path: Path,
    newer: bool,
    ways: tuple[str, ...],
) -> None:
    seen = run_program(sglang_python, request, tiny_folder, tmp_path, newer=newer, ways=ways)
    assert seen["version"] == ("0.5.23" if newer else "0.5.18")
    assert seen["alive"], "closing a lane lets go of the engine, not more"
    for way in ways:
        for number, sync in enumerate(seen[way], start=1):
            assert sync["moved"] >= 1e-2
            assert sync["distance"] <= 1e-4, (way, sync)
            assert sync["through_us"] <= 1e-4, (way, sync)
            assert sync["versions"] == [number]
            assert sync["era"] == ("updates-in-session" if newer else "updates-without-session")
            assert sync["transport"] == ("collective" if way == "collective" else "inline")
            if way in ADAPTER_WAYS:
                assert sync["adapter"] == ("default" if way == "paused" else f"default@{number}")
                assert "adapter bound to 14 of 14 modules" in sync["verified"]
        if way not in ADAPTER_WAYS:
            assert {sync["coverage"] for sync in seen[way]} == {"proven"}
            assert "elements read back equal" in seen[way][0]["verified"], "a lane's first sync is read back"


def run_program(
    python: Path,
    request: pytest.FixtureRequest,
    model: Path,
    folder: Path,
    *,
    newer: bool,
    ways: tuple[str, ...],
) -> Any:
    """What the program saw; its engine takes what `launch-args` prints for a server."""
    arguments = (
        *server_arguments(str(model), tensor_parallel=1, device="cpu"),
        *lora_arguments(4, "two_slot", device="cpu"),
        *LOADER_ARGUMENTS,
    )
    environment = {**os.environ, **server_environment(tensor_parallel=1, device="cpu")}
    if newer:
        before = str(request.getfixturevalue("sglang_newer"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
    answer = folder / "answer"
    finished = subprocess.run(
        [str(python), str(PROGRAM), str(model), str(answer), json.dumps(arguments), *ways],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return json.loads(answer.read_text())
