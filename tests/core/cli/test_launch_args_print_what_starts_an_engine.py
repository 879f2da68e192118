"""`weightlane launch-args` on fake plugins: what is selected, what is printed, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakeSite, Run

LAUNCH = """
from weightlane.contexts import LaunchPlan
@hookimpl
def weightlane_plan_launch(context):
    return LaunchPlan(
        ("-m", "acme.server", "--model", context.model, "--tp", str(context.tensor_parallel),
         "--mode", context.mode.value, "--device", context.facts.device, "--greeting", "it's $HOME; done"),
        environment={"ACME_NOTE": "two words"},
        notes=("Mind the gap.",),
        address=context.address or "unix:/run/acme/front.sock",
        requires=REQUIRES,
    )
"""


def acme(site: FakeSite, *, capabilities: str = "receive-full", requires: tuple[str, ...] = ()) -> str:
    listed = ", ".join(f"Capability({name!r})" for name in capabilities.split())
    source = site.source(more=LAUNCH.replace("REQUIRES", repr(requires)))
    return "from weightlane.types import Capability\n" + source.replace(
        "capabilities=frozenset()", f"capabilities=frozenset([{listed}])"
    )


@pytest.fixture(autouse=True)
def only_fakes(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "a model's folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_command_is_one_thing_that_a_shell_runs_as_meant(
    site: FakeSite, run: Callable[..., Run], checkpoint: Path, tmp_path: Path
) -> None:
    site.plugin("acme-lane", acme(site))
    site.engine("acme-engine", "1.5")
    python = tmp_path / "an env/python"
    python.parent.mkdir()
    tell = "import json, os, sys; print(json.dumps([os.environ.get('ACME_NOTE'), sys.argv[1:]]))"
    path = json.dumps([str(site.folder)])
    python.write_text(
        f"""#!/bin/sh
case "$1" in -c) echo {shlex.quote(path)};; *) exec {sys.executable} -c {shlex.quote(tell)} "$@";; esac
"""
    )
    python.chmod(0o700)
    words = ("launch-args", "acme", "--model", str(checkpoint), "--python", str(python), "--device", "gpu")
    done = run(*words, "--tp", "2")
    assert done.status == 0
    assert "note: Mind the gap." in done.err
    assert 'a lane reaches it as wl.rollout("acme", url="unix:/run/acme/front.sock")' in done.err
    shell = subprocess.run(
        ["/bin/sh", "-c", done.out], capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path
    )
    variable, arguments = json.loads(shell.stdout)
    assert variable == "two words"
    document = run(*words, "--tp", "2", "--json").document
    assert [str(python), *arguments] == document["command"]
    assert document["environment"] == {"ACME_NOTE": "two words"}
    assert arguments[:4] == ["-m", "acme.server", "--model", str(checkpoint)]
    assert arguments[4:10] == ["--tp", "2", "--mode", "full", "--device", "gpu"]
    assert arguments[-1] == "it's $HOME; done"


def test_without_a_model_the_shell_asks_for_it(site: FakeSite, run: Callable[..., Run]) -> None:
    site.plugin("acme-lane", acme(site))
    site.engine("acme-engine", "1.5")
    done = run("launch-args", "acme", "--device", "cpu")
    command = done.out.replace(sys.executable, "echo")
    bare = {key: value for key, value in os.environ.items() if key != "MODEL"}
    asked = {"capture_output": True, "text": True, "timeout": 30}
    unset = subprocess.run(["/bin/sh", "-c", command], env=bare, check=False, **asked)
    assert unset.returncode != 0
    assert "must name the checkpoint folder" in unset.stderr
    given = subprocess.run(["/bin/sh", "-c", command], env={**bare, "MODEL": "/a b"}, check=True, **asked)
    assert "--model /a b" in given.stdout
    document = run("launch-args", "acme", "--device", "cpu", "--json").document
    assert document["model"] is None
    assert "$MODEL" in document["command"]


def test_the_document_has_these_fields_and_no_other(site: FakeSite, run: Callable[..., Run]) -> None:
    site.plugin("acme-lane", acme(site), version="1.2")
    site.engine("acme-engine", "1.5")
    done = run("launch-args", "acme", "--device", "cpu", "--address", "tcp:127.0.0.1:7000", "--json")
    assert (done.status, done.err) == (0, "")
    document = done.document
    notes = document.pop("notes")
    assert "Mind the gap." in notes
    assert any("WEIGHTLANE_FRONT_KEY" in note for note in notes)
    assert document.pop("command")[0] == sys.executable
    assert document == {
        "engine": "acme",
        "engine_version": "1.5",
        "facts_source": "installed",
        "backend": "acme-lane/acme@only",
        "era": "only",
        "distribution": "acme-lane 1.2",
        "evidence": ["acme 1.5 (as installed here) fits acme <2,>=1", "acme 1.5 needs no probe"],
        "mode": "full",
        "model": None,
        "tensor_parallel": 1,
        "device": "cpu",
        "python": sys.executable,
        "environment": {"ACME_NOTE": "two words"},
        "address": "tcp:127.0.0.1:7000",
        "rollout": 'wl.rollout("acme", url="tcp:127.0.0.1:7000")',
    }


def test_a_mode_that_the_backend_cannot_receive_names_those_it_can(
    site: FakeSite, run: Callable[..., Run]
) -> None:
    site.plugin("acme-lane", acme(site, capabilities="receive-merged worker-agent receive-full"))
    site.engine("acme-engine", "1.5")
    assert run("launch-args", "acme", "--device", "cpu", "--mode", "merged").status == 0
    done = run("launch-args", "acme", "--device", "cpu", "--mode", "adapter", "--json")
    error = done.document["error"]
    assert (done.status, error["type"]) == (1, "SelectionError")
    assert error["what"] == "acme (only) of acme-lane 1.0 cannot receive mode adapter."
    assert error["why"] == "It can receive: full, merged."


def test_an_engine_of_unknown_version_is_refused_with_the_way_to_state_it(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", acme(site))
    done = run("launch-args", "acme")
    assert (done.status, done.out) == (1, "")
    assert "acme is not installed here, so its version is not known." in done.err
    assert "WEIGHTLANE_ASSUME_ACME_VERSION=VERSION" in done.err
    assert "--python" in done.err
    monkeypatch.setenv("WEIGHTLANE_ASSUME_ACME_VERSION", "1.5")
    document = run("launch-args", "acme", "--json").document
    assert (document["engine_version"], document["facts_source"]) == ("1.5", "assumed")
    assert (document["device"], document["command"][0]) == ("gpu", "python")
    assert "version 1.5 of acme is assumed, as WEIGHTLANE_ASSUME_ACME_VERSION says" in document["notes"]
    monkeypatch.setenv("WEIGHTLANE_ASSUME_ACME_VERSION", "3.0")
    refused = run("launch-args", "acme")
    assert refused.status == 1
    assert "it serves acme <2,>=1 and found acme 3.0 (as WEIGHTLANE_ASSUME_ACME_VERSION says)" in refused.err


PROBED = """
def sees_nothing(facts):
    return Viable(("seen",)) if facts.attributes else NotViable("nobody looked for it")
"""


@pytest.mark.parametrize(("stated", "viable"), [("1.5", True), ("2.5", False)])
def test_a_stated_version_decides_where_a_probe_has_nothing_to_look_at(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, stated: str, viable: bool
) -> None:
    site.plugin("acme-lane", PROBED + acme(site).replace("probe=always_viable", "probe=sees_nothing"))
    monkeypatch.setenv("WEIGHTLANE_ASSUME_ACME_VERSION", stated)
    done = run("launch-args", "acme", "--json")
    assert done.status == (0 if viable else 1)
    if viable:
        assert any("its probe had nothing to look at" in note for note in done.document["notes"])
    else:
        assert "nobody looked for it" in done.document["error"]["why"]


def test_the_version_is_that_of_the_environment_where_the_engine_is_to_run(
    site: FakeSite, run: Callable[..., Run], tmp_path: Path
) -> None:
    site.plugin("acme-lane", acme(site, requires=("acme-lane",)))
    site.engine("acme-engine", "2.5")
    other = tmp_path / "other"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '[\"{other}\"]'\n")
    python.chmod(0o700)
    words = ("launch-args", "acme", "--device", "cpu", "--python", str(python), "--json")
    assert "not installed in the environment of" in run(*words).document["error"]["what"]
    for name, version in (("acme_engine", "1.9"), ("acme_lane", "1.1")):
        info = other / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        found = run(*words)
        if name == "acme_engine":
            error = found.document["error"]
            assert error["what"] == f"The environment of {python} lacks acme-lane."
            assert error["fix"] == f"Run {python} -m pip install acme-lane."
    assert (found.status, found.document["engine_version"]) == (0, "1.9")
    assert f"{python} has acme-lane 1.1, and this environment 1.0." in found.document["notes"]


def test_a_pin_and_a_broken_plugin_are_met_as_everywhere(
    site: FakeSite, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme", "raise ImportError('no libacme.so')")
    error = run("launch-args", "acme", "--json").document["error"]
    assert error["type"] == "PluginError"
    assert "no libacme.so" in error["what"]
    site.plugin("acme-lane", acme(site))
    site.engine("acme-engine", "1.5")
    monkeypatch.setenv("WEIGHTLANE_PIN_ACME", "acme-lane==2.*")
    assert run("launch-args", "acme", "--json").document["error"]["type"] == "PinError"


def test_wrong_input_is_named(site: FakeSite, run: Callable[..., Run], tmp_path: Path) -> None:
    site.plugin("acme-lane", acme(site))
    site.engine("acme-engine", "1.5")
    unknown = run("launch-args", "acmee")
    assert unknown.status == 1
    assert "Near: acme." in unknown.err
    assert "Write acme." in unknown.err
    model = run("launch-args", "acme", "--device", "cpu", "--model", str(tmp_path))
    assert (model.status, model.out) == (1, "")
    assert "is not a checkpoint folder" in model.err
    interpreter = run("launch-args", "acme", "--python", str(tmp_path / "no/python"))
    assert interpreter.status == 1
    assert "--python" in interpreter.err
    for words in (["--mode", "ful"], ["--tp", "0"], ["--device", "tpu"]):
        assert run("launch-args", "acme", *words).status == 2
