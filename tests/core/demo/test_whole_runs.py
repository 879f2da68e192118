"""The command as a user runs it: real processes, a real lane, a real engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

_MARK = "WEIGHTLANE_DEMO_TEST"
_COMMAND = (sys.executable, "-c", "import sys; from weightlane.cli import main; sys.exit(main())", "demo")


def start(folder: Path, mark: str, *options: str) -> subprocess.Popen[str]:
    scratch = folder / "t"
    scratch.mkdir()
    return subprocess.Popen(
        [*_COMMAND, "--report", str(folder / "report.html"), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, _MARK: mark, "TMPDIR": str(scratch)},
    )


def processes_with(mark: str) -> list[int]:
    """Every process that inherited the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def left_in(folder: Path) -> list[Path]:
    """What the demo itself left behind; torch keeps a cache of its own beside it."""
    return list((folder / "t").glob("weightlane*"))


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    mark = uuid.uuid4().hex
    with start(folder, mark, "--json", *options) as process:
        out, err = process.communicate(timeout=280)
    assert out, err
    assert processes_with(mark) == []
    assert left_in(folder) == []
    document: dict[str, Any] = json.loads(out)
    return process.returncode, document


@pytest.mark.timeout(300)
def test_with_syncs_the_model_learns_and_the_run_passes(tmp_path: Path) -> None:
    status, document = run(tmp_path)
    assert document["reasons"] == []
    assert (document["verdict"], status) == ("PASS", 0)
    rewards = [step["reward"] for step in document["steps"]]
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.9
    assert [step["rollout_versions"] for step in document["steps"]] == [[number] for number in range(1, 11)]
    assert max(step["probs_diff_mean"] for step in document["steps"]) < 1e-5
    assert all(step["nbytes"] == 4 * document["parameters"] for step in document["steps"])
    assert document["closing"]["greedy_differing"] == 0
    assert "PASS" in (tmp_path / "report.html").read_text()


@pytest.mark.timeout(300)
def test_without_syncs_the_rollout_drifts_and_the_run_fails_saying_why(tmp_path: Path) -> None:
    status, document = run(tmp_path, "--no-sync", "--steps", "6")
    assert (document["verdict"], status) == ("FAIL", 1)
    reasons = "\n".join(document["reasons"])
    assert "The rollout is stale: in steps 2 to 6 the engine sampled from version 1" in reasons
    assert "while the trainer held versions 2 to 6" in reasons
    assert "rollout_probs_diff_mean grew to" in reasons
    assert "rollout_actor_probs_pearson_corr fell to" in reasons
    assert "The reward went from" in reasons
    assert document["steps"][0]["probs_diff_mean"] < 1e-5
    assert document["steps"][-1]["probs_diff_mean"] > 1e-3
    assert "FAIL" in (tmp_path / "report.html").read_text()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    with start(tmp_path, mark) as process:
        wait_for(lambda: len(processes_with(mark)) >= 3, "the ranks to start")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in err
    assert processes_with(mark) == []
    assert left_in(tmp_path) == []


@pytest.mark.timeout(120)
def test_ranks_end_when_the_command_is_killed(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with start(tmp_path, mark) as process:
        wait_for(lambda: len(processes_with(mark)) >= 3, "the ranks to start")
        process.kill()
        process.communicate(timeout=60)
    wait_for(lambda: not processes_with(mark), "the ranks to end")


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.05)
