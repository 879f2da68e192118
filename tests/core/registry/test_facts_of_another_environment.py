"""An engine that is to run in another environment is looked for there, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.facts import EngineFacts
from weightlane.installations import find_distribution
from weightlane.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from conftest import FakeSite

    from weightlane.contexts import FactsContext
    from weightlane.types import BackendDescriptor


@pytest.fixture
def elsewhere(site: FakeSite, tmp_path: Path) -> str:
    """A folder with acme-engine 1.5, while this environment has 2.5."""
    site.engine("acme-engine", "2.5")
    info = tmp_path / "there/acme_engine-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engine\nVersion: 1.5\n")
    return str(info.parent)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(environ={}, project=tmp_path)


def test_metadata_is_read_there(
    registry: Registry,
    elsewhere: str,
    make_plugin: Callable[..., ModuleType],
    make_backend: Callable[..., BackendDescriptor],
) -> None:
    registry.register(make_plugin(make_backend()), name="acme")
    assert registry.collect_facts("acme").version == "2.5"
    facts = registry.collect_facts("acme", search_path=[elsewhere])
    assert (facts.version, facts.source) == ("1.5", "installed")
    assert registry.collect_facts("acme", search_path=[f"{elsewhere}/none"]).version == ""


def test_a_plugin_that_looks_here_all_the_same_is_not_believed(
    registry: Registry,
    elsewhere: str,
    make_plugin: Callable[..., ModuleType],
    make_backend: Callable[..., BackendDescriptor],
) -> None:
    def old(context: FactsContext) -> EngineFacts:
        found = find_distribution(context.distributions)
        assert found is not None
        return EngineFacts(
            engine="acme", version=found.version, source="installed", attributes={"of.here": True}
        )

    registry.register(make_plugin(make_backend(), weightlane_collect_facts=old), name="acme")
    assert registry.collect_facts("acme").attributes
    facts = registry.collect_facts("acme", search_path=[elsewhere])
    assert (facts.version, facts.attributes) == ("1.5", {})


def test_the_first_name_that_is_installed_counts(elsewhere: str) -> None:
    found = find_distribution(("acme-gpu", "Acme_Engine"), [elsewhere])
    assert found is not None
    assert found.version == "1.5"
    assert find_distribution(("acme-gpu",), [elsewhere]) is None
    assert find_distribution(()) is None
