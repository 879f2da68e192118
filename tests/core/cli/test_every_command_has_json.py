"""`--json` and exit statuses, over all commands that there are, so that a new one cannot leave them out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import typer

from weightlane.cli.app import COMMANDS, app

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakeSite, Run

NEEDED = {
    "diff": ["vllm", "1.0", "2.0", "--arch", "FakeForCausalLM"],
    "explain": ["name", "--engine", "vllm", "--arch", "FakeForCausalLM"],
    "launch-args": ["reference"],
    "plan": [".", "--engine", "vllm"],
}
"""What a command cannot do without."""


@pytest.fixture(autouse=True)
def only_fakes(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)


def commands_without_json(group: Any) -> list[str]:
    """Every command below a typer application, however deep, that has no option `--json`."""
    lacking: list[str] = []
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            lacking += [f"{name} {below}" for below in commands_without_json(command)]
        elif not any("--json" in parameter.opts for parameter in command.params):
            lacking.append(name)
    return lacking


def test_every_command_takes_json() -> None:
    group: Any = typer.main.get_command(app)
    assert {"backends", "demo", "doctor", "launch-args"} <= set(group.list_commands(None))
    assert commands_without_json(group) == []


def test_a_command_without_json_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = typer.Typer()

    @plain.command()
    def plain_command(name: str = "") -> None:
        """Has no --json."""

    class FakeModule:
        app = plain

    found = importlib.import_module
    monkeypatch.setitem(COMMANDS, "plain", "fake.plain")
    monkeypatch.setattr(
        importlib, "import_module", lambda name: FakeModule if name == "fake.plain" else found(name)
    )
    assert commands_without_json(typer.main.get_command(app)) == ["plain"]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_json_too(run: Callable[..., Run], command: str) -> None:
    for words in (["--json", "--nonsense"], ["--jsn"]):
        done = run(command, *words)
        assert done.status == 2
        if "--json" in words:
            assert done.err == ""
            assert set(done.document["error"]) == {"type", "what", "why", "fix"}
            assert "--nonsense" in done.document["error"]["what"]
            assert f"weightlane {command} --help" in done.document["error"]["fix"]
        else:
            assert done.out == ""
            assert "--jsn" in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_is_json_with_the_same_status(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "two words")
    words = (command, *NEEDED.get(command, []))
    plain = run(*words)
    as_json = run(*words, "--json")
    assert (plain.status, plain.out) == (1, "")
    assert "WEIGHTLANE_PIN_ACME" in plain.err
    assert (as_json.status, as_json.document["error"]["type"]) == (1, "PinError")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_breaks_exits_with_two_and_shows_its_traceback(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("weightlane.registry.Registry", broken)
    words = (command, *NEEDED.get(command, []))
    plain = run(*words)
    assert (plain.status, plain.out) == (2, "")
    assert "RuntimeError: a bug" in plain.err
    assert "Traceback" in plain.err
    done = run(*words, "--json")
    assert done.status == 2
    assert done.document["error"]["type"] == "RuntimeError"
    assert "a bug" in done.document["error"]["what"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["doctor"], 0),
        (["backends"], 0),
        (["doctor", "vlllm"], 1),
        (["launch-args", "vlllm"], 1),
        (["launch-args"], 2),
        (["doctorr"], 2),
        (["plan", "."], 2),
        (["explain", "name"], 2),
        (["diff", "vllm", "0.1", "0.2", "--arch", "FakeForCausalLM"], 1),
    ],
)
def test_the_status_is_the_same_with_and_without_json(
    run: Callable[..., Run], words: list[str], status: int
) -> None:
    assert run(*words).status == status
    done = run(*words, "--json")
    assert done.status == status
    assert isinstance(done.document, dict)


@pytest.mark.parametrize("words", [["doctor", "vlllm"], ["launch-args", "vlllm"]])
def test_an_unknown_engine_has_near_ones(run: Callable[..., Run], words: list[str]) -> None:
    done = run(*words)
    assert done.status == 1
    assert "vllm" in (done.out + done.err).replace("vlllm", "")


def test_a_mistyped_command_names_the_near_one(run: Callable[..., Run]) -> None:
    assert "'doctor'" in run("doctorr", "--json").document["error"]["what"]
