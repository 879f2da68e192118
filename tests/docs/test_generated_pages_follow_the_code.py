"""What the site says of backends, commands and messages comes from the code: a new one appears by itself."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import pytest
import typer
from packaging.specifiers import SpecifierSet

from weightlane.cli.app import COMMANDS
from weightlane.hookspecs import hookimpl
from weightlane.probes import NotViable, ProbeResult, always_viable
from weightlane.registry import Registry
from weightlane.types import BackendDescriptor, Capability, TransportName

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.facts import EngineFacts

    Script = Callable[[str], ModuleType]


def probe_fake_fields(facts: EngineFacts) -> ProbeResult:
    """Whether the fake engine has its fields."""
    return NotViable(f"{facts.engine} is a fake")


def fake_plugin(era: str, probe: Callable[[EngineFacts], ProbeResult] = probe_fake_fields) -> ModuleType:
    descriptor = BackendDescriptor(
        name="fake",
        role="rollout",
        engine="fakeengine",
        era=era,
        versions=SpecifierSet(">=7.1,<9"),
        distributions=("fakeengine",),
        probe=probe,
        capabilities=frozenset({Capability.RECEIVE_ADAPTER}),
        transports=(TransportName.SHM,),
        summary="A fake.",
    )
    plugin = ModuleType("fake_plugin")
    plugin.weightlane_register_backends = hookimpl(lambda: [descriptor])  # type: ignore[attr-defined]
    return plugin


def test_a_backend_more_is_a_row_more(script: Script, tmp_path: Path) -> None:
    matrix = script("support_matrix")
    registry = Registry(environ={}, project=tmp_path)
    registry.register(fake_plugin("old-fields"), name="old", distribution="fake-one")
    before = matrix.matrix_rows(registry)
    registry.register(fake_plugin("new-fields"), name="new", distribution="fake-two")
    after = matrix.matrix_rows(registry)
    (new,) = set(after) - set(before)
    assert len(after) == len(before) + 1
    assert (new.engine, new.role, new.era, new.distribution) == (
        "fakeengine",
        "rollout",
        "new-fields",
        "fake-two",
    )
    page, shorter = matrix.matrix_page(after), matrix.matrix_page(before)
    assert page.count("\n   * - ") == shorter.count("\n   * - ") + 1
    for word in ("fakeengine", "new-fields", ">=7.1, <9", "receive-adapter", "shm", "probe_fake_fields"):
        assert f"``{word}``" in page
    assert "Whether the fake engine has its fields." in page
    assert "new-fields" not in shorter


def test_a_backend_without_a_probe_says_that_its_range_decides(script: Script, tmp_path: Path) -> None:
    matrix = script("support_matrix")
    registry = Registry(environ={}, project=tmp_path)
    registry.register(fake_plugin("any", always_viable), name="fake", distribution="fake-one")
    page = matrix.matrix_page(matrix.matrix_rows(registry))
    assert "none: the range decides" in page
    assert "always_viable" not in page


def test_the_installed_backends_are_in_the_matrix(script: Script) -> None:
    matrix = script("support_matrix")
    rows = matrix.matrix_rows(matrix.installed_registry())
    assert {"torch", "reference", "vllm", "sglang"} <= {row.engine for row in rows}


def test_no_page_states_a_range_by_hand(script: Script, docs: Path) -> None:
    matrix = script("support_matrix")
    pages = "\n".join(path.read_text() for path in docs.glob("*.rst"))
    for row in matrix.matrix_rows(matrix.installed_registry()):
        assert row.versions not in pages, row.engine
        assert row.versions.replace(", ", ",") not in pages, row.engine
        assert row.era not in pages, row.engine


def test_every_command_is_in_the_reference_with_its_options(script: Script) -> None:
    reference = script("command_reference")
    page = reference.command_pages(reference.app, "weightlane")
    for name in COMMANDS:
        section = page.split(f"\nweightlane {name}\n----")[1].split("\n.. _command-")[0]
        assert "``--json``" in section, name
        assert f"weightlane {name} [OPTIONS]" in section


def test_a_command_more_is_a_section_more_and_a_hidden_one_is_not(script: Script) -> None:
    reference = script("command_reference")
    application = typer.Typer(add_completion=False)
    inner = typer.Typer()
    application.add_typer(inner, name="group")

    @application.command()
    def plain() -> None:
        """Does *nothing* with some_name."""

    @application.command(hidden=True)
    def secret() -> None:
        """Not told."""

    @inner.command()
    def nested(
        count: Annotated[int, typer.Option(help="How many.")] = 3,
        unseen: Annotated[int, typer.Option(hidden=True)] = 0,
    ) -> None:
        """Sits in a group."""

    page = reference.command_pages(application, "tool")
    assert "tool plain\n----------" in page
    assert r"Does \*nothing\* with some\_name." in page
    assert "tool group nested\n-----------------" in page
    assert "``--count" in page
    assert "How many. [default: 3]" in page
    assert "secret" not in page
    assert "unseen" not in page


SAID = {
    "chosen": "UpdateWeights has bulk",
    "newer": "PluginWarning: ",
    "probe-refuses": "although acme 2.4",
    "assumed": "is assumed, as WEIGHTLANE_ASSUME_ACME_VERSION says",
    "tie": "SelectionError",
    "pinned": "pinned to fork-weightlane==1.*",
    "pin-unmet": "PinError",
    "conflict": "is in conflict",
    "conflict-pinned": "fork-weightlane 1.0: chosen",
    "disabled": "is disabled",
    "broken": "is broken",
    "broken-rival": "acme-weightlane 1.0: chosen",
    "incompatible": "contract 99.0",
    "strict": "asks for every installed plugin to work",
    "unknown-engine": "Near: acme",
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_words_of_selection_are_what_the_code_says(script: Script, name: str) -> None:
    assert SAID[name] in script("selection_words").SCENES[name].words()


def test_the_selection_page_shows_every_scene(script: Script, docs: Path) -> None:
    page = (docs / "selection.rst").read_text()
    scenes = set(script("selection_words").SCENES)
    assert scenes == set(SAID)
    assert {name for name in scenes if f"_generated/selection-{name}.txt" not in page} == set()


def test_the_start_page_has_the_two_commands_of_the_readme(
    block: Callable[[str, str], str], docs: Path
) -> None:
    readme = (docs.parent / "README.md").read_text()
    assert f"<!-- the two commands -->\n```\n{block('index.rst', 'two-commands')}```" in readme
