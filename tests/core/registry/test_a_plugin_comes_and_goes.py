"""A distribution made here, built by hatchling, installed by pip: found, chosen, pinned against ours, called,
told of by `doctor` in each of its states, and gone again after pip has removed it.

It lands in an environment of its own, which sees the packages of the one that runs the tests. Commands run
there in fresh interpreters: before the install, with it and after the removal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-lane"
version = "1.2.3"
description = "A rollout backend for two engines: acme's own, and the reference engine."

[project.entry-points.weightlane]
acme = "acme_lane.plugin"

[tool.hatch.build.targets.wheel]
packages = ["acme_lane"]
"""

PLUGIN = '''
"""Registers the backends; heavy imports stay in the hooks."""

import os

from packaging.specifiers import SpecifierSet

from weightlane.hookspecs import hookimpl
from weightlane.probes import NotViable, Viable
from weightlane.types import CORE_API_VERSION, BackendDescriptor, Capability

if os.environ.get("ACME_IS") == "broken":
    raise ImportError("libacme.so.3: cannot open shared object file")


def probe(facts):
    if os.environ.get("ACME_IS") == "not viable":
        return NotViable("the engine has no route /acme/weights; it exists since acme 2.4")
    return Viable(("route /acme/weights is there",))


def backend(engine, versions, distribution):
    return BackendDescriptor(
        name=f"acme-{engine}", role="rollout", engine=engine, era="routes", versions=SpecifierSet(versions),
        distributions=(distribution,), probe=probe,
        capabilities=frozenset({Capability.RECEIVE_FULL, Capability.WORKER_AGENT}),
        api_version=(9, 0) if os.environ.get("ACME_IS") == "of the future" else CORE_API_VERSION,
        install_hint="pip install acme-engine",
    )


@hookimpl
def weightlane_register_backends():
    return [backend("acme", ">=2,<3", "acme-engine"), backend("reference", ">=4", "transformers")]


@hookimpl
def weightlane_worker_agent(context):
    from acme_lane.agent import AcmeWorker

    return AcmeWorker(context.worker)


@hookimpl
def weightlane_map_names(context):
    for name in ("a.weight", "b.weight"):
        yield name
    if os.environ.get("ACME_IS") == "raising":
        raise KeyError("c.weight")
'''

AGENT = '''
"""The engine's side."""


class AcmeWorker:
    def __init__(self, worker):
        self.worker = worker

    def describe(self):
        return f"acme's hands on {self.worker}"
'''

COMMANDS = """
import contextlib, io, json, os, sys

import weightlane.registry
from weightlane.cli import main

own = dict(os.environ)
told = []
for environ, words in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(own, **environ)
    for name in [name for name in sys.modules if name.startswith("acme_lane")]:
        del sys.modules[name]
    weightlane.registry._process_registry = None
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if words[0] == "python":
            exec(words[1])
            status = 0
        else:
            status = main(words)
    told.append({"status": status, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(told))
"""

CALLS = """
import json
from weightlane.contexts import AgentContext
from weightlane.errors import HookError
from weightlane.registry import get_registry
from weightlane.selection import select
registry = get_registry()
selected = select(registry, "rollout", "acme", registry.collect_facts("acme"))
worker = registry.call_worker_agent(selected, AgentContext(selected.descriptor, "rank 0"))
try:
    names = registry.call_map_names(selected, None)
except HookError as exc:
    names = str(exc)
print(json.dumps([selected.origin, worker.describe(), names]))
"""

PIN = "WEIGHTLANE_PIN_REFERENCE"


@dataclass(frozen=True)
class Told:
    """What one command gave."""

    status: int
    out: str
    err: str


class Environment:
    """A virtual environment whose interpreter also sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        # Not a plain path: the editable installs of this environment are in .pth files of their own.
        ours = sysconfig.get_path("purelib")
        (self.site / "packages_of_the_tests.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def pip(self, *words: str) -> str:
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *words]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            cwd=self.folder,
            env=self._environ(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def weightlane(self, asked: dict[str, tuple[dict[str, str], list[str]]]) -> dict[str, Told]:
        done = subprocess.run(
            [str(self.python), "-W", "ignore", "-c", COMMANDS],
            input=json.dumps(list(asked.values())),
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            cwd=self.folder,
            env=self._environ(),
        )
        assert done.returncode == 0, done.stderr
        return {name: Told(**told) for name, told in zip(asked, json.loads(done.stdout), strict=True)}

    def installed_by_hand(self, distribution: str, version: str, entries: str = "") -> None:
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entries)

    @staticmethod
    def _environ() -> dict[str, str]:
        apart = ("WEIGHTLANE_", "PIP_", "VIRTUAL_ENV")
        return {key: value for key, value in os.environ.items() if not key.startswith(apart)}


ASKED: dict[str, tuple[dict[str, str], list[str]]] = {
    "listed": ({}, ["backends", "--json"]),
    "tie": ({}, ["doctor"]),
    "pinned to it": ({PIN: "acme-lane==1.2.*"}, ["doctor"]),
    "pinned to ours": ({PIN: "weightlane"}, ["doctor"]),
    "pin not met": ({PIN: "acme-lane>=2"}, ["doctor"]),
    "disabled": ({"WEIGHTLANE_DISABLE_PLUGINS": "acme-lane"}, ["doctor"]),
    "broken": ({"ACME_IS": "broken"}, ["doctor", "acme"]),
    "broken and strict": ({"ACME_IS": "broken", "WEIGHTLANE_STRICT_PLUGINS": "1"}, ["doctor"]),
    "incompatible": ({"ACME_IS": "of the future"}, ["doctor"]),
    "not viable": ({"ACME_IS": "not viable"}, ["doctor", "acme"]),
    "chosen": ({PIN: "acme-lane"}, ["doctor", "acme"]),
    "called": ({}, ["python", CALLS]),
    "raising": ({"ACME_IS": "raising"}, ["python", CALLS]),
    "locking": ({PIN: "acme-lane"}, ["lock", "--rollout", "reference"]),
    "locked": ({PIN: "acme-lane"}, ["doctor", "--locked", "weightlane.lock"]),
    "locked to it, pinned to ours": ({PIN: "weightlane"}, ["lock", "--locked", "weightlane.lock"]),
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Everything that was told, by step."""
    folder = tmp_path_factory.mktemp("acme")
    source = folder / "source"
    (source / "acme_lane").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "acme_lane" / "__init__.py").write_text("")
    (source / "acme_lane" / "plugin.py").write_text(PLUGIN)
    (source / "acme_lane" / "agent.py").write_text(AGENT)
    environment = Environment(folder / "venv")
    told = environment.weightlane({"before": ({}, ["doctor", "acme"])})
    environment.pip("install", "--no-index", "--no-deps", "--no-build-isolation", str(source))
    told |= environment.weightlane({"engine missing": ({}, ["doctor", "acme"])})
    environment.installed_by_hand("acme-engine", "2.5")
    told |= environment.weightlane(ASKED)
    environment.installed_by_hand("fork-lane", "0.1", "[weightlane]\nacme = fork_lane\n")
    told |= environment.weightlane({"conflict": ({}, ["doctor"])})
    environment.pip("uninstall", "--yes", "acme-lane")
    for folder in ("fork_lane-0.1.dist-info", "acme_engine-2.5.dist-info"):
        shutil.rmtree(environment.site / folder)
    told |= environment.weightlane(
        {
            "after": ({}, ["doctor", "acme"]),
            "still ours": ({}, ["doctor"]),
            "locked and gone": ({}, ["doctor", "--locked", "weightlane.lock"]),
            "pinned and gone": ({PIN: "acme-lane"}, ["doctor"]),
        }
    )
    return told


def one_line(told: Told, start: str) -> str:
    found = [line.strip() for line in told.out.splitlines() if line.strip().startswith(start)]
    assert found, told.out
    return found[0]


def test_before_the_install_doctor_knows_nothing_of_it_and_says_what_to_do(story: dict[str, Told]) -> None:
    assert story["before"].status == 1
    assert "acme: No plugin registers acme." in story["before"].out
    assert "Install a distribution that registers a backend for acme." in story["before"].out


def test_installed_by_pip_it_is_discovered(story: dict[str, Told]) -> None:
    found: dict[str, Any] = json.loads(story["listed"].out)
    (row,) = [row for row in found["backends"] if row["name"] == "acme-acme"]
    assert (row["distribution"], row["version"], row["state"]) == ("acme-lane", "1.2.3", "active")
    (plugin,) = [row for row in found["plugins"] if row["distribution"] == "acme-lane"]
    assert "weightlane_worker_agent" in plugin["hooks"]


def test_without_its_engine_doctor_says_which_command_adds_it(story: dict[str, Told]) -> None:
    told = story["engine missing"]
    assert told.status == 1
    assert "acme: acme is not installed here." in told.out
    assert "Run pip install acme-engine." in told.out


def test_with_its_engine_it_is_chosen_on_its_evidence(story: dict[str, Told]) -> None:
    told = story["chosen"]
    assert told.status == 0
    assert one_line(told, "usable       acme").endswith("acme-acme (routes) of acme-lane 1.2.3")
    assert "acme 2.5 (as installed here) fits acme <3,>=2" in told.out
    assert "route /acme/weights is there" in told.out
    assert "All is well." in told.out


def test_against_ours_it_is_a_tie_and_doctor_says_how_to_settle_it(story: dict[str, Told]) -> None:
    told = story["tie"]
    assert told.status == 1
    problem = one_line(told, "reference: 2 backends fit reference equally well.")
    assert "acme-reference (routes) of acme-lane 1.2.3 (priority 0)" in problem
    assert "reference (transformers-4.50) of weightlane" in problem
    assert "Pin one, such as plugin=" in told.out


@pytest.mark.parametrize(
    ("step", "origin"),
    [
        ("pinned to it", "acme-reference (routes) of acme-lane 1.2.3"),
        ("pinned to ours", "reference (transformers-4.50) of weightlane"),
    ],
)
def test_a_pin_settles_it_either_way(story: dict[str, Told], step: str, origin: str) -> None:
    assert story[step].status == 0
    assert origin in one_line(story[step], "usable       reference")
    assert "pinned to" in story[step].out


def test_a_pin_that_is_not_met_is_a_problem_with_the_command_that_meets_it(story: dict[str, Told]) -> None:
    told = story["pin not met"]
    assert told.status == 1
    assert "The pin acme-lane>=2 for reference (environment variable WEIGHTLANE_PIN_REFERENCE)" in told.out
    assert "acme-lane 1.2.3 is installed." in told.out
    assert "Run pip install 'acme-lane>=2', or change the pin." in told.out


def test_disabled_it_is_shown_as_such_and_is_no_problem(story: dict[str, Told]) -> None:
    told = story["disabled"]
    assert told.status == 0
    assert one_line(told, "disabled").endswith("acme of acme-lane 1.2.3: WEIGHTLANE_DISABLE_PLUGINS names it")


def test_broken_it_is_a_problem_with_its_cause_and_a_way_out(story: dict[str, Told]) -> None:
    told = story["broken"]
    assert told.status == 1
    assert "ImportError: libacme.so.3: cannot open shared object file" in one_line(told, "broken")
    assert "pip uninstall acme-lane" in told.out
    assert "reference (transformers-4.50)" in one_line(told, "usable       reference")  # ours goes on
    assert story["broken and strict"].status == 1
    assert (
        "WEIGHTLANE_STRICT_PLUGINS asks for every installed plugin to work." in story["broken and strict"].err
    )


def test_of_another_contract_it_is_incompatible_and_doctor_says_what_to_upgrade(
    story: dict[str, Told],
) -> None:
    told = story["incompatible"]
    assert told.status == 1
    assert "contract 9.0, which is newer than this core's" in one_line(told, "incompatible")
    assert "Run pip install -U weightlane acme-lane" in told.out


def test_where_its_probe_says_no_doctor_gives_the_reason(story: dict[str, Told]) -> None:
    told = story["not viable"]
    assert told.status == 1
    assert "the engine has no route /acme/weights; it exists since acme 2.4" in told.out


def test_in_conflict_with_another_distribution_both_are_named(story: dict[str, Told]) -> None:
    told = story["conflict"]
    assert told.status == 1
    assert "entry point acme is claimed by acme-lane 1.2.3, fork-lane 0.1" in one_line(told, "conflict")
    assert (
        "None of them is used until one is pinned (export WEIGHTLANE_PIN_ACME=acme-lane) or removed"
        in told.out
    )


def test_its_hooks_and_its_worker_agent_are_called(story: dict[str, Told]) -> None:
    origin, worker, names = json.loads(story["called"].out)
    assert origin == "acme-acme (routes) of acme-lane 1.2.3"
    assert worker == "acme's hands on rank 0"
    assert names == ["a.weight", "b.weight"]


def test_an_error_while_its_names_are_iterated_names_it(story: dict[str, Told]) -> None:
    message = json.loads(story["raising"].out)[2]
    for words in ("weightlane_map_names", "acme-lane:acme of acme-lane 1.2.3", "KeyError", "c.weight"):
        assert words in message


def test_a_lock_that_names_it_is_kept_and_refuses_ours(story: dict[str, Told]) -> None:
    assert story["locking"].status == 0, story["locking"].err
    assert story["locked"].status == 0
    refused = story["locked to it, pinned to ours"]
    assert refused.status == 1
    assert "rollout reference: distribution: the lock names acme-lane, here is weightlane" in refused.err


def test_removed_by_pip_it_is_gone_and_ours_is_chosen_again(story: dict[str, Told]) -> None:
    assert story["after"] == story["before"]
    assert story["still ours"].status == 0
    assert "reference (transformers-4.50) of weightlane" in one_line(
        story["still ours"], "usable       reference"
    )


def test_removed_though_a_lock_or_a_pin_names_it_doctor_says_what_is_missing(story: dict[str, Told]) -> None:
    locked, pinned = story["locked and gone"], story["pinned and gone"]
    assert (locked.status, pinned.status) == (1, 1)
    assert "the lock names acme-lane 1.2.3, here is none of it" in locked.out
    assert "acme-lane is not installed, or registers no plugin; there is " in pinned.out
    assert "Run pip install 'acme-lane', or change the pin." in pinned.out


def test_the_environment_was_not_this_one() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("acme_lane")
    assert "acme_lane" not in sys.modules
