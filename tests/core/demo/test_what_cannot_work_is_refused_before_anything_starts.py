from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from weightlane.cli import main
from weightlane.demo import preflight
from weightlane.registry import get_registry
from weightlane.types import Capability

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr("subprocess.Popen", refuse)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--trainer", "fsdpp"], 1, ["No trainer backend fits fsdpp", "torch"]),
        (["--rollout", "vllmm"], 1, ["No rollout backend fits vllmm", "reference"]),
        (["--mode", "adapterr"], 2, ["There is no mode 'adapterr'", "Near: adapter"]),
        (["--rollout-python", "/nowhere/python"], 1, ["/nowhere/python is not a file"]),
        (["--model", "/nowhere"], 1, ["/nowhere is not a checkpoint folder", "config.json"]),
        (["--report", "/nowhere/report.html"], 1, ["cannot be written", "/nowhere is not a folder"]),
        (["--mode", "ful"], 2, ["There is no mode 'ful'", "Near: full"]),
        (["--url", "unix:/tmp/x.sock"], 2, ["--url unix:/tmp/x.sock needs --model"]),
        (["--steps", "2"], 2, ["--steps"]),
    ],
)
def test_what_cannot_work_is_1_and_wrong_usage_2_and_the_cause_is_named(
    options: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options]) == status
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_a_mode_that_no_era_of_an_engine_receives_is_refused_with_those_it_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [item.descriptor for item in get_registry().backends() if item.descriptor.engine == "sglang"]
    fewer = [item for item in known if Capability.RECEIVE_ADAPTER not in item.capabilities]
    assert 0 < len(fewer) < len(known)
    monkeypatch.setattr(preflight, "_rollouts", lambda engine: fewer)
    assert main(["demo", "--mode", "adapter", "--rollout", "sglang", "--rollout-python", "/bin/sh"]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in ("does not know mode adapter", "receive-merged")), told


def test_an_engine_that_is_elsewhere_needs_its_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rollout", "vllm"]) == 2
    assert "--rollout vllm needs --rollout-python or --url" in capsys.readouterr().err


def test_json_carries_the_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--json", "--model", str(tmp_path)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "EngineError"
    assert "is not a checkpoint folder" in error["what"]
