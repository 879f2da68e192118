"""Whether there is a GPU is asked of the engine's own interpreter, for which a script stands in here."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.demo import engines
from weightlane.demo.engines import EngineStart, start_engine
from weightlane.demo.interpreter import has_gpu
from weightlane.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[[str], Path]:
    """An interpreter that answers whatever it is given with the shell line `answer`."""

    def make(answer: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{answer}\n")
        python.chmod(0o700)
        return python

    return make


def start(engine: str, python: Path) -> EngineStart:
    return EngineStart(engine, model=Path("/model"), python=python, folder=Path("/folder"))


def sglang_answers(device: str, folder: Path) -> str:
    """Shell that answers where it imports from with `folder`, and anything else with `device`."""
    return f"""case "$2" in *sys.path*) echo '["{folder}"]';; *) echo {device};; esac"""


@pytest.mark.parametrize(("rank", "allowed"), [(0, ""), (4, "8"), (16, "16")])
def test_vllm_has_slots_for_an_adapter_where_one_is_to_be_sent(
    fake_python: Any, monkeypatch: pytest.MonkeyPatch, rank: int, allowed: str
) -> None:
    given: list[tuple[str, ...]] = []

    @contextmanager
    def fake_start(command: tuple[str, ...], *args: object, **options: object) -> Iterator[None]:
        given.append(command)
        yield

    monkeypatch.setattr(engines, "start_front_process", fake_start)
    with start_engine(replace(start("vllm", fake_python("echo cpu")), lora_rank=rank)):
        (command,) = given
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", allowed)
    assert command[-5:] == lora if rank else "--enable-lora" not in command


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_vllm_sees_the_gpus_of_a_gpu_machine(
    fake_python: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    given: list[dict[str, str]] = []

    @contextmanager
    def fake_start(*args: object, environment: dict[str, str], **options: object) -> Iterator[None]:
        given.append(environment)
        yield

    monkeypatch.setattr(engines, "start_front_process", fake_start)
    with start_engine(start("vllm", fake_python(f"echo {device}"))):
        (environment,) = given
    assert ("CUDA_VISIBLE_DEVICES" in environment) is (device == "cpu")


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_sglang_is_started_on_the_gpu_of_a_gpu_machine(
    fake_python: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    given: list[Any] = []

    @contextmanager
    def fake_server(settings: Any, **options: object) -> Iterator[Any]:
        given.append(settings)
        yield SimpleNamespace(url="http://here")

    monkeypatch.setattr("weightlane_sglang.launch.launched_server", fake_server)
    with start_engine(start("sglang", fake_python(sglang_answers(device, tmp_path)))) as engine:
        assert engine.url == "http://here"
    assert [settings.device for settings in given] == [device]
    assert "--custom-weight-loader" not in given[0].arguments, "SGLang would die of one that it cannot import"


def test_sglang_lets_our_code_in_where_its_environment_holds_it(
    fake_python: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    @contextmanager
    def fake_server(settings: Any, **options: object) -> Iterator[Any]:
        given.append(settings)
        yield SimpleNamespace(url="http://here")

    monkeypatch.setattr("weightlane_sglang.launch.launched_server", fake_server)
    held = tmp_path / "weightlane_sglang-0.1.0.dist-info"
    held.mkdir()
    (held / "METADATA").write_text("Metadata-Version: 2.1\nName: weightlane-sglang\nVersion: 0.1.0\n")
    with start_engine(start("sglang", fake_python(sglang_answers("cpu", tmp_path)))):
        option = given[0].arguments.index("--custom-weight-loader")
    assert given[0].arguments[option + 1] == "weightlane_sglang.weight_loader.answer"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'no module named torch.' >&2; exit 1", "no module named torch"),
        ("echo maybe", "cannot tell whether there is a GPU"),
        ("exit 0", "no reason given"),
    ],
)
def test_no_answer_is_not_taken_for_cpu(fake_python: Any, answer: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        has_gpu(fake_python(answer), "vllm")


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no/python does not run"):
        has_gpu(tmp_path / "no/python", "vllm")


def test_a_real_torch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert has_gpu(Path(sys.executable), "vllm") is False
