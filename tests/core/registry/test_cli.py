"""`weightlane backends` and `doctor` on fake distributions: what they print and how they exit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import weightlane
import weightlane.registry
from weightlane.cli import main

if TYPE_CHECKING:
    from conftest import FakeSite


@pytest.fixture(autouse=True)
def only_fakes(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status, out, _ = run(capsys, *words, "--json")
    return status, json.loads(out)


def test_backends_shows_what_is_chosen_and_on_which_evidence(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-lane", site.source(), version="1.2")
    site.engine("acme-engine", "1.5")
    status, out, _ = run(capsys, "backends")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("acme "))
    assert row.split() == ["acme", "rollout", "acme", "only", "<2,>=1", "acme-lane", "1.2", "active", "yes"]
    assert "acme 1.5 (as installed here) fits acme <2,>=1" in out


def test_backends_says_that_an_engine_is_not_installed(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-lane", site.source())
    status, found = run_json(capsys, "backends")
    (row,) = found["backends"]
    assert (status, row["chosen"], row["reason"]) == (0, False, "acme is not installed here")


def test_backends_as_typer_sees_it_prints_the_same(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    from weightlane.cli.app import app

    site.plugin("acme-lane", site.source())
    plain = run(capsys, "backends", "--json")
    with pytest.raises(SystemExit) as left:
        app(args=["backends", "--json"], prog_name="weightlane")
    assert (left.value.code or 0, capsys.readouterr().out) == plain[:2]


@pytest.mark.parametrize("command", ["backends", "doctor"])
def test_plugins_that_cannot_be_used_are_shown_with_their_state(
    site: FakeSite, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    status, out, _ = run(capsys, command)
    assert status == (0 if command == "backends" else 1)
    assert "broken-lane of broken-lane 1.0 is broken: its import failed: ImportError: no libacme.so" in out


def test_doctor_is_content_where_all_that_is_installed_is_served(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-lane", site.source())
    site.engine("acme-engine", "1.5")
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "All is well." in out
    assert "acme 1.5 (rollout): acme (only) of acme-lane 1.0" in out


def test_doctor_does_not_mind_an_engine_that_is_not_here_unless_it_is_asked_for(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-lane", site.source())
    assert run(capsys, "doctor")[0] == 0
    status, found = run_json(capsys, "doctor", "acme")
    assert status == 1
    assert found["problems"][0]["what"] == "acme is not installed here."


def test_doctor_names_the_command_that_adds_a_missing_plugin(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "doctor", "vllm")
    assert status == 1
    assert "pip install 'weightlane-vllm'" in out


def test_doctor_tells_of_an_installed_engine_that_no_plugin_serves(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.engine("sglang", "0.5.18")
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "sglang 0.5.18: pip install 'weightlane-sglang'" in out
    status, found = run_json(capsys, "doctor", "sglang")
    assert status == 1
    assert found["problems"][0]["what"] == "sglang is installed, but no plugin here serves it."


def test_doctor_fails_where_an_installed_engine_fits_no_backend(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-lane", site.source())
    site.engine("acme-engine", "2.5")
    status, found = run_json(capsys, "doctor")
    assert status == 1
    assert "it serves acme <2,>=1 and found acme 2.5" in found["problems"][0]["what"]


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_fails_where_a_pin_is_not_met(
    site: FakeSite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
) -> None:
    site.plugin("acme-lane", site.source())
    if installed:
        site.engine("acme-engine", "1.5")
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "acme-lane==2.*")
    status, found = run_json(capsys, "doctor")
    assert status == 1
    assert "acme-lane 1.0 is installed" in found["problems"][0]["what"]
    assert "pip install 'acme-lane==2.*'" in found["problems"][0]["fix"]


def test_doctor_is_content_with_a_pin_that_is_met_for_an_engine_that_is_not_here(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source())
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "acme-lane==1.*")
    assert run(capsys, "doctor")[0] == 0


def test_doctor_fails_for_a_pinned_engine_that_no_plugin_registers(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "acme-lane==2.*")
    status, found = run_json(capsys, "doctor")
    assert status == 1
    assert found["problems"][0]["fix"] == "Run pip install 'acme-lane==2.*', or remove the pin."


def test_doctor_names_near_engines_of_one_it_does_not_know(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run_json(capsys, "doctor", "sglagn")
    assert (status, found["problems"][0]["what"]) == (1, "No plugin registers sglagn; near: sglang.")


def test_a_typed_error_is_three_sentences_without_a_traceback(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "two words")
    status, out, err = run(capsys, "doctor")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 3
    assert "WEIGHTLANE_PIN_ACME" in err
    status, found = run_json(capsys, "backends")
    assert (status, found["error"]["type"]) == (1, "PinError")
    assert all(found["error"][part] for part in ("what", "why", "fix"))


@pytest.mark.parametrize("words", [["nonsense"], ["backends", "--nonsense"], ["doctor", "--jsn"], []])
def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(capsys, *words)[0] == 2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"weightlane {weightlane.__version__}\n")
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(name in out for name in ("backends", "doctor"))
