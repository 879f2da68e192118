"""`weightlane plan`: the whole answer before anything is sent, from the best source there is."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from weightlane.facts import EngineFacts
from weightlane.trace.contract_text import parse_contract
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from pathlib import Path

K = "model.layers.1.self_attn.k_proj.weight"
QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"


def change_checkpoint(folder: Path, *, without: str = "", **more: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    held = {name: tensor for name, tensor in load_file(path).items() if name != without}
    save_file({**held, **more}, path)


def test_an_engine_that_is_installed_is_traced_here(acme: Any) -> None:
    status, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--json")
    assert status == 0
    assert (document["basis"], document["coverage"]) == ("model built here", "assumed")
    assert document["problems"] == []
    assert document["style"] == "plain"
    assert {"target": QKV, "sources": [QKV.replace("qkv", name) for name in "qkv"]} in document["groups"]
    assert len(document["entries"]) == document["tensors"]
    status, text, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--fresh")
    assert status == 0
    for line in (
        "coverage assumed: traced on the model of acme 1.0, built here without data; no engine was asked",
        "  rotary: a buffer that no checkpoint holds: the engine makes it itself",
        "No problem was found.",
    ):
        assert line in text.split("\n")


def test_a_live_engine_is_traced_and_nothing_else_is_asked_of_it(acme: Any) -> None:
    status, document, _ = acme.run(
        "plan", str(acme.folder), "--to", "http://far:1", "--engine", "acme", "--json"
    )
    assert (status, document["problems"]) == (0, [])
    assert (document["basis"], document["coverage"]) == ("live engine", "proven")
    assert document["transport"] == "inline"
    assert set(acme.plugin.live.calls) == {"describe", "trace", "close"}
    assert acme.plugin.live.calls[-1] == "close"


def test_the_engine_at_an_address_is_found_without_its_name(acme: Any) -> None:
    status, document, _ = acme.run("plan", str(acme.folder), "--to", "http://far:1", "--json")
    assert (status, document["receiver"]) == (0, "acme 1.0 at http://far:1")


@pytest.mark.parametrize("engine", [(), ("--engine", "reference")])
@pytest.mark.parametrize(
    ("left", "why"), [(False, "There is no such socket."), (True, "The connection was refused: ")]
)
def test_where_nothing_listens_nobody_is_told_to_restart_an_engine(
    acme: Any, tmp_path: Path, engine: tuple[str, ...], left: bool, why: str
) -> None:
    path = tmp_path / "s"
    if left:
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
    status, answer, _ = acme.run("plan", str(acme.folder), "--to", f"unix:{path}", *engine, "--json")
    assert status == 1
    assert answer["error"]["what"] == f"Nothing listens at unix:{path}."
    assert answer["error"]["why"].startswith(why)
    assert "restart" not in answer["error"]["fix"]


@pytest.mark.parametrize("receiver", [("--engine", "acme"), ("--to", "http://far:1", "--engine", "acme")])
def test_all_problems_come_at_once_with_status_one(acme: Any, receiver: tuple[str, ...]) -> None:
    change_checkpoint(acme.folder, without=K, extra=torch.zeros(3, dtype=torch.bfloat16))
    status, document, _ = acme.run("plan", str(acme.folder), *receiver, "--json")
    assert status == 1
    found = {(item["kind"], item["subject"]) for item in document["problems"]}
    assert {("extra-name", "extra"), ("missing-name", K)} <= found
    groups = [item for item in document["problems"] if item["kind"] == "incomplete-group"]
    assert K in groups[0]["what"]
    status, text, _ = acme.run("plan", str(acme.folder), *receiver)
    assert status == 1
    assert f"[missing-name] {K}: " in text
    assert f"{len(document['problems'])} problems" in text


def test_an_engine_that_is_not_here_is_assumed_from_its_snapshot(
    acme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"acme_snapshots_{tmp_path.name.replace('-', '_')}"
    (package / "contracts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    status, text, _ = acme.run(
        "plan", str(acme.folder), "--engine", "acme", "--write-contract", str(package / "contracts")
    )
    written = package / "contracts/1.0/FakeForCausalLM-tp1.txt"
    assert status == 0
    assert f"Wrote {written}." in text
    assert parse_contract(written.read_text(), origin="it").title == "acme 1.0 FakeForCausalLM"
    acme.plugin.contracts = package.name
    acme.plugin.trace = lambda tensors: Untraced("it cannot be built without data")
    status, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--fresh", "--json")
    assert (status, document["basis"], document["coverage"]) == (0, "snapshot", "assumed")
    assert document["reason"] == (
        "from the snapshot of acme 1.0 FakeForCausalLM; it cannot be built without data"
    )
    assert {entry["rule"] for entry in document["entries"]} == {"assumed, plain names"}
    status, answer, _ = acme.run(
        "explain", "model.layers.30.self_attn.q_proj.weight", "--engine", "acme",
        "--arch", "FakeForCausalLM", "--json",
    )  # fmt: skip
    assert (status, answer["answer"]["verdict"], answer["basis"]) == (0, "placed", "snapshot")


def test_a_live_engine_that_cannot_be_entered_is_planned_from_its_snapshot(
    acme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"acme_live_{tmp_path.name.replace('-', '_')}"
    (package / "contracts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    acme.run("plan", str(acme.folder), "--engine", "acme", "--write-contract", str(package / "contracts"))
    acme.plugin.contracts = package.name
    acme.plugin.live.trace = lambda tensors: Untraced("nothing of ours runs there")
    words = ("plan", str(acme.folder), "--to", "http://far:1", "--engine", "acme", "--json")
    acme.plugin.live.known = EngineFacts(
        "acme", "1.0", "server", launch_arguments={"architecture": "FakeForCausalLM"}
    )
    status, document, _ = acme.run(*words)
    assert (status, document["basis"], document["coverage"]) == (0, "snapshot", "assumed")
    assert document["reason"] == ("from the snapshot of acme 1.0 FakeForCausalLM; nothing of ours runs there")
    assert {entry["rule"] for entry in document["entries"]} == {"assumed, plain names"}
    _, answer, _ = acme.run("explain", K, "--model", *words[1:])
    assert answer["answer"]["rule"] == "snapshot of acme 1.0 FakeForCausalLM, plain names"
    change_checkpoint(acme.folder, without=K)
    status, document, _ = acme.run(*words)
    assert (status, {item["kind"] for item in document["problems"]}) == (
        1,
        {"missing-name", "incomplete-group"},
    )
    acme.plugin.live.known = msgspec.structs.replace(acme.plugin.live.known, version="1.0.1")
    status, document, _ = acme.run(*words)
    assert (document["basis"], document["coverage"]) == ("static rules", "untraced")
    assert "there is one of 1.0, which is not taken for it" in document["reason"]


def test_without_a_snapshot_it_is_untraced_and_the_command_for_one_is_told(acme: Any) -> None:
    acme.plugin.trace = lambda tensors: Untraced("it cannot be built without data")
    status, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--json")
    assert (status, document["basis"], document["coverage"]) == (0, "static rules", "untraced")
    assert (
        "weightlane plan DIR --engine acme --to ADDRESS --write-contract FOLDER makes one"
        in document["reason"]
    )
    status, answer, _ = acme.run(
        "plan", str(acme.folder), "--engine", "acme", "--write-contract", str(acme.folder), "--json"
    )
    assert status == 2
    assert "no loader was run" in answer["error"]["why"]
    assert sorted(path.name for path in acme.folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name a receiver"),
        (("--to", "http://far:1", "--tp", "2"), "a live engine tells this itself"),
        (("--to", "http://far:1", "--fresh"), "a live engine is always traced anew"),
    ],
)
def test_wrong_usage_says_what_is_missing(acme: Any, words: tuple[str, ...], told: str) -> None:
    status, answer, _ = acme.run("plan", str(acme.folder), *words, "--json")
    assert status == 2
    assert told in answer["error"]["what"]


def test_explain_prints_a_tree_and_a_document(acme: Any) -> None:
    words = ("explain", K, "--model", str(acme.folder), "--to", "http://far:1", "--engine", "acme")
    status, text, _ = acme.run(*words)
    assert status == 0
    lines = text.split("\n")
    assert lines[0] == f"{K}: a checkpoint tensor, placed"
    assert "├─ receiver: acme 1.0 at http://far:1, live engine, coverage proven" in lines
    assert any(line.startswith("   └─ worker 0: ") for line in lines)
    status, document, _ = acme.run(*words, "--json")
    assert (status, document["answer"]["group"][0]) == (0, K.replace("k_proj", "q_proj"))
    status, text, _ = acme.run("explain", K.replace("k_p", "kk_p"), *words[2:])
    assert status == 1
    assert f"Did you mean {K}?" in text


@pytest.mark.parametrize("words", [("--engine", "acme"), ("--engine", "acme", "--arch", "A", "--model", ".")])
def test_explain_needs_a_checkpoint_or_an_architecture(acme: Any, words: tuple[str, ...]) -> None:
    status, answer, _ = acme.run("explain", K, *words, "--json")
    assert status == 2
    assert "give --model DIR, or --arch NAME instead" in answer["error"]["what"]


def test_diff_compares_two_versions_by_their_snapshots(
    acme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"acme_diff_{tmp_path.name.replace('-', '_')}"
    (package / "contracts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    acme.run("plan", str(acme.folder), "--engine", "acme", "--write-contract", str(package / "contracts"))
    name = "FakeForCausalLM-tp1.txt"
    text = (package / "contracts/1.0" / name).read_text()
    for version, changed in (("1.1", text), ("2.0", text.replace("o_proj.weight: whole", "o.weight: whole"))):
        (package / "contracts" / version).mkdir()
        (package / "contracts" / version / name).write_text(changed.replace("acme 1.0", f"acme {version}"))
    acme.plugin.contracts = package.name
    same = ("diff", "acme", "1.0", "1.1", "--arch", "FakeForCausalLM")
    assert acme.run(*same)[:2] == (
        0,
        "acme 1.0 and 1.1, FakeForCausalLM-tp1: they do the same with every name.\n",
    )
    status, text, _ = acme.run("diff", "acme", "1.0", "2.0", "--arch", "FakeForCausalLM")
    assert status == 1
    assert "acme 1.0 and 2.0, FakeForCausalLM-tp1: 1 difference\n" in text
    o_proj = "model.layers.{layer}.self_attn.o_proj.weight"
    renamed = o_proj.replace("o_proj", "o")
    assert f"~ {o_proj}: receiver tensor was {o_proj}, is {renamed}" in text
    status, document, _ = acme.run("diff", "acme", "1.0", "2.0", "--arch", "FakeForCausalLM", "--json")
    assert (status, [item["change"] for item in document["differences"]]) == (1, ["changed"])
    status, document, _ = acme.run("diff", "acme", "1.0", "3.0", "--arch", "FakeForCausalLM", "--json")
    assert (status, document["error"]["type"]) == (1, "ContractError")
    assert "1.0, 1.1, 2.0" in document["error"]["why"]
    status, document, _ = acme.run("diff", "torch", "1.0", "3.0", "--arch", "FakeForCausalLM", "--json")
    assert (status, document["error"]["type"]) == (1, "SelectionError")
    assert acme.run("diff", "acme", "1.0", "1.0", "--arch", "FakeForCausalLM")[0] == 2


def test_a_stated_version_is_not_traced_by_another_one_that_is_installed(acme: Any) -> None:
    acme.plugin.installed = "2.0"  # as facts tell a stated version; the model that is built is 1.0's
    status, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--json")
    assert (status, document["basis"], document["figures"]) == (0, "static rules", None)
    assert "acme 1.0 is installed here and 2.0 is stated" in document["reason"]
    assert "unset WEIGHTLANE_ASSUME_ACME_VERSION" in document["reason"]
    acme.plugin.installed = "1.0+cpu"
    _, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--json")
    assert document["basis"] == "model built here"


def test_static_rules_say_that_they_leave_lora_out(acme: Any) -> None:
    acme.plugin.trace = lambda tensors: Untraced("it cannot be built without data")
    _, document, _ = acme.run("plan", str(acme.folder), "--engine", "acme", "--lora", "--json")
    assert document["basis"] == "static rules"
    assert "static rules are those of an engine with LoRA off" in document["reason"]
