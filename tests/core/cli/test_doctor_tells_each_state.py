"""`weightlane doctor` for all that can be amiss: the state, its meaning, and what mends it, tried out."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakeSite, Run


@pytest.fixture(autouse=True)
def only_fakes(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)


def engine(document: Any, name: str = "acme") -> Any:
    (row,) = (row for row in document["engines"] if row["engine"] == name)
    return row


def test_a_plugin_without_its_engine_is_right_on_a_trainer_and_wrong_where_it_is_asked_for(
    site: FakeSite, run: Callable[..., Run]
) -> None:
    site.plugin("acme-lane", site.source())
    done = run("doctor")
    assert done.status == 0
    assert "That is right on a trainer or a controller: they reach engines by address." in done.out
    assert "A trainer rank or a controller needs none" in done.out
    asked = run("doctor", "acme", "--json")
    (problem,) = asked.document["problems"]
    assert (asked.status, engine(asked.document)["state"]) == (1, "not-installed")
    assert problem["command"].startswith("pip install 'acme-engine")
    site.engine("acme-engine", "1.5")
    after = run("doctor", "acme", "--json")
    assert (after.status, engine(after.document)["state"], after.document["remarks"]) == (0, "usable", [])


def test_where_there_is_nothing_at_all_doctor_says_how_to_begin(
    site: FakeSite, run: Callable[..., Run]
) -> None:
    done = run("doctor")
    assert done.status == 0
    assert "none: no distribution here has an entry point of group weightlane" in done.out
    assert "vllm: pip install 'weightlane-vllm'" in done.out
    row = engine(run("doctor", "--json").document, "vllm")
    assert (row["state"], row["command"]) == ("absent", "pip install 'weightlane-vllm'")


def test_an_engine_without_its_plugin(site: FakeSite, run: Callable[..., Run]) -> None:
    site.engine("sglang", "0.5.18")
    row = engine(run("doctor", "--json").document, "sglang")
    assert (row["state"], row["version"]) == ("no-plugin", "0.5.18")
    assert row["says"] == "It is installed, and no plugin here serves it."
    (problem,) = run("doctor", "sglang", "--json").document["problems"]
    assert problem["command"] == "pip install 'weightlane-sglang'"


def test_a_disabled_plugin_is_no_fault_unless_its_engine_is_asked_for(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source(), entry="acme")
    site.engine("acme-engine", "1.5")
    monkeypatch.setenv("WEIGHTLANE_DISABLE_PLUGINS", "acme")
    done = run("doctor")
    assert done.status == 0
    assert "disabled     acme of acme-lane 1.0: WEIGHTLANE_DISABLE_PLUGINS names it" in done.out
    assert "To use it, take it out of WEIGHTLANE_DISABLE_PLUGINS." in done.out
    (problem,) = run("doctor", "acme", "--json").document["problems"]
    assert "acme of acme-lane 1.0 is disabled" in problem["what"]
    monkeypatch.delenv("WEIGHTLANE_DISABLE_PLUGINS")
    assert run("doctor", "acme").status == 0


def test_a_disabled_plugin_of_ours_is_not_told_to_be_missing(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("weightlane-vllm", site.source(engine="vllm"), entry="vllm")
    monkeypatch.setenv("WEIGHTLANE_DISABLE_PLUGINS", "*")
    asked = run("doctor", "vllm", "--json")
    assert asked.status == 1
    assert engine(asked.document, "vllm")["state"] == "blocked"
    assert asked.document["problems"][0]["fix"] == "Take it out of WEIGHTLANE_DISABLE_PLUGINS."


def test_a_conflict_is_settled_by_the_command_that_is_told(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme-one", "acme-two"):
        site.plugin(name, site.source(), entry="acme")
    site.engine("acme-engine", "1.5")
    done = run("doctor", "--json")
    assert done.status == 1
    assert [row["state"] for row in done.document["plugins"]] == ["conflict", "conflict"]
    problems = done.document["problems"]
    assert [problem["command"] for problem in problems] == [
        "export WEIGHTLANE_PIN_ACME=acme-one",
        "export WEIGHTLANE_PIN_ACME=acme-two",
    ]
    assert "claimed by acme-one 1.0, acme-two 1.0" in problems[0]["what"]
    _, assignment = shlex.split(problems[1]["command"])
    monkeypatch.setenv(*assignment.split("=", 1))
    after = run("doctor", "acme", "--json").document
    assert engine(after)["backend"] == "acme (only) of acme-two 1.0"


def test_an_incompatible_plugin(site: FakeSite, run: Callable[..., Run]) -> None:
    site.plugin("acme-lane", site.source(api="(9, 0)"))
    site.engine("acme-engine", "1.5")
    done = run("doctor", "acme")
    assert done.status == 1
    assert "incompatible acme-lane of acme-lane 1.0" in done.out
    document = run("doctor", "--json").document
    (problem,) = document["problems"]
    assert "is newer than this core's" in problem["what"]
    assert problem["command"] == "pip install -U weightlane acme-lane"
    assert engine(document)["state"] == "blocked"


def test_a_broken_plugin_does_not_hide_the_others(site: FakeSite, run: Callable[..., Run]) -> None:
    site.plugin("bad-lane", "import a_module_that_nobody_has", entry="bad")
    site.plugin("acme-lane", site.source())
    site.engine("acme-engine", "1.5")
    done = run("doctor", "acme", "bad", "--json")
    assert engine(done.document)["state"] == "usable"
    assert [problem["subject"] for problem in done.document["problems"]] == ["plugin bad", "bad"]
    for problem in done.document["problems"]:
        assert "No module named 'a_module_that_nobody_has'" in problem["what"]
        assert problem["command"] == "pip install -U weightlane bad-lane"
        assert "pip uninstall bad-lane" in problem["fix"]


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("0.9", "pip install 'acme-engine<2,>=1'"),
        ("2.5", "pip install -U acme-lane"),
    ],
)
def test_a_version_out_of_range_says_which_side_has_to_move(
    site: FakeSite, run: Callable[..., Run], version: str, command: str
) -> None:
    site.plugin("acme-lane", site.source())
    site.engine("acme-engine", version)
    done = run("doctor", "--json")
    (problem,) = done.document["problems"]
    assert (done.status, problem["command"]) == (1, command)
    assert "pip install 'acme-engine<2,>=1'" in problem["fix"]
    assert f"it serves acme <2,>=1 and found acme {version}" in problem["what"]


def test_an_engine_newer_than_every_range_whose_probe_passes_is_usable_and_noted(
    site: FakeSite, run: Callable[..., Run]
) -> None:
    probe = "lambda facts: Viable(('load_weights is defined',))"
    site.plugin("acme-lane", site.source(probe=probe))
    site.engine("acme-engine", "2.5")
    done = run("doctor", "acme")
    assert done.status == 0
    assert "note: acme 2.5 (as installed here) is newer than the versions" in done.out


def test_an_assumed_version_counts_and_is_called_one(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source())
    monkeypatch.setenv("WEIGHTLANE_ASSUME_ACME_VERSION", "1.5")
    done = run("doctor", "acme")
    assert done.status == 0
    assert "assumed      acme 1.5 (rollout): acme (only) of acme-lane 1.0" in done.out
    assert "its version is what WEIGHTLANE_ASSUME_ACME_VERSION states" in done.out
    site.engine("acme-engine", "0.1+odd")
    installed = run("doctor", "--json").document
    assert (engine(installed)["state"], engine(installed)["version"]) == ("usable", "1.5")
    assert any("is assumed" in note for note in engine(installed)["notes"])
    monkeypatch.setenv("WEIGHTLANE_ASSUME_ACME_VERSION", "3")
    assert run("doctor").status == 1


def test_the_document_has_these_fields(site: FakeSite, run: Callable[..., Run]) -> None:
    site.plugin("acme-lane", site.source(), version="1.2")
    site.plugin("bad-lane", "raise ImportError")
    site.engine("acme-engine", "1.5")
    done = run("doctor", "acme", "--json")
    document = done.document
    assert set(document) == {
        *("format", "status", "weightlane", "python", "asked", "packages", "plugins", "engines", "remarks"),
        "problems",
    }
    assert (document["format"], document["status"], document["asked"]) == (1, done.status, ["acme"])
    assert all(set(row) == set(document["plugins"][0]) for row in document["plugins"])
    assert set(document["plugins"][0]) == {
        *("name", "distribution", "version", "state", "error", "hooks", "engines", "sentence", "fix"),
        "command",
    }
    assert set(engine(document)) == {
        *("engine", "role", "version", "source", "state", "backend", "evidence", "notes", "says", "problem"),
        *("fix", "command"),
    }
    assert set(document["problems"][0]) == {"subject", "what", "fix", "command"}
    assert document["packages"]["pluggy"]


def test_help_tells_what_each_exit_status_means(run: Callable[..., Run]) -> None:
    words = " ".join(run("doctor", "--help").out.replace("│", " ").split())
    assert all(text in words for text in ("Exit status 0: all is well", "Exit status 1:", "status 2: wrong"))
