"""Fake distributions: real dist-info folders with real entry points, on sys.path for one test."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet

import weightlane.notices
import weightlane.registry
from weightlane.discovery import Entry, PluginStatus, find_entries
from weightlane.hookspecs import hookimpl
from weightlane.probes import always_viable
from weightlane.registry import Registry
from weightlane.types import BackendDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

sys.path.insert(0, str(Path(__file__).parents[1] / "messages"))

HEAD = """
from packaging.specifiers import SpecifierSet
from weightlane.hookspecs import hookimpl
from weightlane.probes import NotViable, Viable, always_viable
from weightlane.types import BackendDescriptor, CORE_API_VERSION
"""


@dataclass
class FakeSite:
    """A folder of fake distributions; `load` gives a registry that sees those and nothing else."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        *,
        version: str = "1.0",
        modules: Mapping[str, str],
    ) -> None:
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[weightlane]\n{lines}\n")
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(source)

    def plugin(self, distribution: str, source: str, *, entry: str = "", version: str = "1.0") -> str:
        """Installs a distribution of one plugin; gives its module's name."""
        module = f"fake_{distribution.replace('-', '_')}"
        self.install(distribution, {entry or distribution: module}, version=version, modules={module: source})
        return module

    def remove(self, distribution: str) -> None:
        """Undoes `plugin` or `engine`."""
        for info in self.folder.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)
        (self.folder / f"fake_{distribution.replace('-', '_')}.py").unlink(missing_ok=True)
        self.forget_modules()

    def forget_modules(self) -> None:
        """Lets the next `load` import the modules anew."""
        for name in [name for name in sys.modules if name.startswith("fake_")]:
            del sys.modules[name]
        shutil.rmtree(self.folder / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()

    def engine(self, distribution: str, version: str) -> None:
        """Installs an engine's metadata, without any engine."""
        self.install(distribution, {}, version=version, modules={})

    def source(
        self,
        *,
        engine: str = "acme",
        api: str = "CORE_API_VERSION",
        probe: str = "always_viable",
        more: str = "",
    ) -> str:
        """The text of a plugin module with one backend, serving versions 1.*; `more` is added to it."""
        return f"""{HEAD}
@hookimpl
def weightlane_register_backends():
    return [BackendDescriptor(
        name={engine!r}, role="rollout", engine={engine!r}, era="only", versions=SpecifierSet(">=1,<2"),
        distributions=("acme-engine",), probe={probe}, capabilities=frozenset(), api_version={api},
    )]

{textwrap.dedent(more)}
"""

    def status(self, registry: Registry, distribution: str) -> PluginStatus:
        (found,) = (item for item in registry.statuses() if item.distribution == distribution)
        return found

    def load(self) -> Registry:
        return Registry(environ=self.environ, project=self.folder).load()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(weightlane.notices, "_shown", set())
    monkeypatch.setattr(weightlane.notices, "_logged", set())
    monkeypatch.setattr(weightlane.registry, "find_entries", _only_in(folder))
    before = set(sys.modules)
    yield FakeSite(folder)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


def _only_in(folder: Path) -> Callable[[], tuple[Entry, ...]]:
    def found() -> tuple[Entry, ...]:
        return tuple(
            entry for entry in find_entries() if entry.damage or (folder / f"{_module(entry)}.py").exists()
        )

    return found


def _module(entry: Entry) -> str:
    return entry.point.value.partition(":")[0]


@pytest.fixture
def make_plugin() -> Callable[..., ModuleType]:
    """Makes a plugin in this process: descriptors, then hook implementations by name."""

    def make(*descriptors: BackendDescriptor, **hooks: Callable[..., object]) -> ModuleType:
        plugin = ModuleType("fake_plugin")
        hooks["weightlane_register_backends"] = lambda: list(descriptors)
        for name, function in hooks.items():
            setattr(plugin, name, hookimpl(function))
        return plugin

    return make


@pytest.fixture
def make_backend() -> Callable[..., BackendDescriptor]:
    """Makes a descriptor of a rollout backend for engine `acme`; any field may be given."""

    def make(**fields: object) -> BackendDescriptor:
        base = BackendDescriptor(
            name="acme",
            role="rollout",
            engine="acme",
            era="only",
            versions=SpecifierSet(">=1,<2"),
            distributions=("acme-engine",),
            probe=always_viable,
            capabilities=frozenset(),
        )
        fields = {key: SpecifierSet(value) if key == "versions" else value for key, value in fields.items()}
        return dataclasses.replace(base, **fields)

    return make
