"""Requests that run in an `AsyncLLM` through syncs of each kind: every output is one version's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from weightlane_vllm.launch import FrontStart, front_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parent / "programs/running_requests.py"


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    ("older", "syncs", "end"),
    [
        pytest.param(False, 1, "killed", id="0.32"),
        pytest.param(False, 8, "removed", id="0.32-long", marks=pytest.mark.long_run),
        pytest.param(True, 3, "killed", id="0.27.1", marks=pytest.mark.long_run),
    ],
)
def test_every_output_is_made_by_one_version(
    vllm_python: Path,
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path: Path,
    older: bool,
    syncs: int,
    end: str,
) -> None:
    environment = {**os.environ, **front_environment(FrontStart(str(tiny_folder), "", "cpu"))}
    if older:
        before = str(request.getfixturevalue("vllm_older"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
    finished = subprocess.run(
        [str(vllm_python), str(PROGRAM), str(tiny_folder), str(tmp_path / "answer"), str(syncs), end],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    seen = json.loads((tmp_path / "answer").read_text())
    labels = None if older else True
    full_weights(seen, syncs, labels)
    adapters(seen, syncs, labels)
    ended = seen["end"]
    if end == "killed":
        assert ended["through_the_front"] == [998]
        assert ended["label"] == 998
        assert str(ended["process"]) in ended["call"][0]
    assert ended["call"][0].startswith("EngineDeadError")
    assert ended["next"].startswith("EngineDeadError")
    assert ended["took"] < 10.0


def full_weights(seen: dict[str, Any], syncs: int, labels: bool | None) -> None:
    for policy, first in (("drain", 1), ("abort", 101)):
        load = seen[policy]
        assert load["errors"] == []
        assert load["by_one_version"]
        assert load["as_labelled"] is labels
        assert load["makers"] == list(range(first, first + 1 + syncs)), "requests ran before and after each"
        assert (load["aborted"] > 0) is (policy == "abort")
    assert seen["drain"]["hit_the_prefix_cache"] > 0
    assert seen["drain"]["through_the_front"] == [True] * syncs
    kept = seen["keep"]
    assert kept["errors"] == []
    assert set(kept["lengths"]) == {250}
    if labels:
        assert all(len(spans) == 2 for spans in kept["spans"])
        assert kept["first_by_old"]
        assert kept["then_by_new"]
    late = seen["late"]
    assert "did not finish pause_generation (wait) within 0.5 s" in late["error"]
    assert (late["went_on"], late["length"], late["next"]) == ([True], [300], True)
    assert "the cable is out" in late["unwritten"]
    assert late["served_on"]
    stale = seen["stale"]
    assert stale["stale_hit"] >= 128, "else nothing is shown"
    assert stale["stale_is_wrong"]
    assert stale["fresh_is_right"]
    assert "did not reset its prefix cache" in stale["failed_reset"]


def adapters(seen: dict[str, Any], syncs: int, labels: bool | None) -> None:
    beside = seen["two_slot"]
    for load in (beside, beside["aborts"], seen["paused"]):
        assert load["errors"] == []
        assert load["by_one_version"]
    assert beside["as_named"]
    assert beside["aborted"] == 0
    assert beside["makers"] == list(range(1, 2 + syncs))
    assert beside["hit_the_prefix_cache"] > 0
    assert "not served any more" in beside["refused"]
    assert beside["aborts"]["aborted"] == 1
    assert beside["aborts"]["as_named"]
    assert beside["published_again"]
    assert seen["paused"]["makers"] == list(range(1, 2 + syncs))
    assert seen["paused"]["as_labelled"] is labels
    dropped = seen["dropped"]
    assert dropped["errors"] == []
    assert dropped["refused"] > 0
    assert dropped["base_is_served"] == "length"
    assert dropped["again"]
