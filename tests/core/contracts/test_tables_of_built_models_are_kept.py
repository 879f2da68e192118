"""A model that was built here is not built again while all that its tables rest on stands."""

from __future__ import annotations

import stat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.trace.built_from import built_from
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

K = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def traces(acme: Any) -> list[int]:
    """One entry for each time that the plugin is asked."""
    asked: list[int] = []
    trace = acme.plugin.trace

    def counted(tensors: Any) -> Any:
        asked.append(len(tensors))
        return trace(tensors)

    acme.plugin.trace = acme.plugin.live.trace = counted
    return asked


@pytest.fixture
def plan(acme: Any) -> Callable[..., Any]:
    def run(*words: str) -> Any:
        status, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--json", *words)
        assert status == 0
        return document

    return run


def test_the_second_plan_is_made_from_what_the_first_kept(
    acme: Any, traces: list[int], plan: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = plan(), plan()
    assert len(traces) == 1
    (kept,) = (tmp_path / "cache/weightlane/tables").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert second["reason"] == (
        f"{first['reason']}; the tables are those of an earlier call, kept in {kept} (--fresh traces anew)"
    )
    assert {**first, "reason": ""} == {**second, "reason": ""}
    status, text, _ = acme.run("explain", K, "--model", str(acme.folder), "--engine", "acme")
    assert (status, len(traces)) == (0, 1)
    assert f"kept in {kept} (--fresh traces anew)" in text


def test_fresh_and_a_contract_are_traced_anew(
    acme: Any, traces: list[int], plan: Callable[..., Any], tmp_path: Path
) -> None:
    plan()
    assert "earlier call" not in plan("--fresh")["reason"]
    assert len(traces) == 2
    plan("--write-contract", str(tmp_path / "contracts"))
    assert len(traces) == 3
    assert "earlier call" in plan()["reason"]
    words = ("explain", K, "--engine", "acme", "--arch", "FakeForCausalLM", "--fresh", "--json")
    status, answer, _ = acme.run(*words)
    assert (status, "nothing is built" in answer["error"]["what"]) == (2, True)


def test_a_live_engine_is_always_traced_anew(traces: list[int], plan: Callable[..., Any]) -> None:
    plan()
    per_look = []
    for _ in range(2):
        before = len(traces)
        assert plan("--to", "http://far:1")["coverage"] == "proven"
        per_look.append(len(traces) - before)
    assert per_look[0] == per_look[1] > 0


def change_config(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (acme.folder / "config.json").write_text('{"architectures": ["FakeForCausalLM"], "more": 1}')


def bring_code(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (acme.folder / "modeling_fake.py").write_text("")


def change_engine(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acme.plugin.installed = "1.0+other"


def set_variable(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_ATTENTION", "other")


def change_software(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (acme.folder.parent / "torch-99.dist-info").mkdir()
    monkeypatch.syspath_prepend(acme.folder.parent)


def change_our_text(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trace.built_from._sources", lambda package: [package.encode()])


@pytest.mark.parametrize(
    "change",
    [change_config, bring_code, change_engine, set_variable, change_software, change_our_text],
    ids=lambda change: change.__name__,
)
def test_whatever_changes_is_traced_anew(
    acme: Any,
    traces: list[int],
    plan: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., None],
) -> None:
    plan()
    change(acme, monkeypatch)
    assert "earlier call" not in plan()["reason"]
    assert len(traces) == 2


def test_what_cannot_be_built_is_asked_again(acme: Any, plan: Callable[..., Any]) -> None:
    trace, acme.plugin.trace = acme.plugin.trace, lambda tensors: Untraced("not now")
    assert plan()["basis"] == "static rules"
    acme.plugin.trace = trace
    assert plan()["basis"] == "model built here"


def test_a_folder_that_cannot_be_used_is_told_and_the_plan_is_made(
    traces: list[int], plan: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "cache/weightlane/tables"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    for _ in range(2):
        document = plan()
        assert document["basis"] == "model built here"
        (note,) = [note for note in document["notes"] if "not kept" in note]
        assert str(folder) in note
    assert len(traces) == 2


@pytest.mark.parametrize("told", ['{"url": "file:///a", "dir_info": {"editable": true}}', "{"])
def test_an_engine_that_runs_from_a_working_tree_has_nothing_kept(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    installed = SimpleNamespace(metadata={"Name": "acme"}, read_text=lambda name: told)
    monkeypatch.setattr("weightlane.trace.built_from.find_distribution", lambda names: installed)
    context: Any = SimpleNamespace(descriptor=SimpleNamespace(distributions=("acme",)), facts=None)
    nothing: Any = None
    answer = built_from(nothing, "", context, {})
    assert isinstance(answer, Untraced)
    assert answer.reason == "acme runs from a working tree, which may change under one version"
