from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from conftest import Distribution

FIVE = {"weightlane", "weightlane-vllm", "weightlane-sglang", "weightlane-fsdp", "weightlane-megatron"}


def test_there_are_the_five_distributions(distributions: dict[str, Distribution]) -> None:
    assert set(distributions) == FIVE


def test_all_have_one_version(distributions: dict[str, Distribution]) -> None:
    versions = {name: distribution.version for name, distribution in distributions.items()}
    assert len(set(versions.values())) == 1, versions


def test_packages_state_the_version_of_their_distribution(distributions: dict[str, Distribution]) -> None:
    # Read, not imported: what is installed may be an older build.
    for distribution in distributions.values():
        text = (distribution.package / "__init__.py").read_text()
        stated = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
        assert stated == [distribution.version], distribution.name


def test_plugins_require_the_minor_of_core(core: Distribution, plugins: list[Distribution]) -> None:
    version = Version(core.version)
    expected = SpecifierSet(f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}")
    for plugin in plugins:
        requirements = map(Requirement, plugin.pyproject["project"]["dependencies"])
        specifiers = [
            requirement.specifier for requirement in requirements if requirement.name == "weightlane"
        ]
        assert specifiers == [expected], plugin.name


def test_the_extras_of_core_name_each_plugin_at_this_version(
    core: Distribution, plugins: list[Distribution]
) -> None:
    extras = core.pyproject["project"]["optional-dependencies"]
    for plugin in plugins:
        assert extras[plugin.folder.name] == [f"{plugin.name}=={plugin.version}"]


def test_installed_are_the_versions_of_this_tree(distributions: dict[str, Distribution]) -> None:
    for name, distribution in distributions.items():
        assert importlib.metadata.version(name) == distribution.version
