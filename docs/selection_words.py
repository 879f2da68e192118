#!/usr/bin/env python3
"""What people read when a backend is chosen or refused, obtained by running the code that says it.

Each scene is a folder of made-up distributions for a made-up engine, loaded by the real registry. `conf.py`
writes the words whenever the site is built. By hand: `python docs/selection_words.py` prints them.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.errors import WeightlaneError
from weightlane.facts import EngineFacts
from weightlane.notices import PluginWarning
from weightlane.registry import Registry
from weightlane.selection import select

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLUGIN = """
from packaging.specifiers import SpecifierSet
from weightlane.hookspecs import hookimpl
from weightlane.probes import NotViable, Viable, always_viable, require_request_fields
from weightlane.types import CORE_API_VERSION, BackendDescriptor

def probe_bulk_update(facts):
    return require_request_fields(facts, "UpdateWeights", ("bulk",))

@hookimpl
def weightlane_register_backends():
    return [BackendDescriptor(
        name="acme", role="rollout", engine="acme", era="{era}", versions=SpecifierSet("{versions}"),
        distributions=("acme-engine",), probe={probe}, capabilities=frozenset(), api_version={api},
    )]
"""
HAS_BULK = {"UpdateWeights": ("names", "bulk")}
LACKS_BULK = {"UpdateWeights": ("names",)}


@dataclass(frozen=True, slots=True)
class FakePlugin:
    """One distribution with one entry point, and the backend that it registers."""

    distribution: str
    version: str = "1.0"
    entry: str = ""
    era: str = "bulk-update"
    versions: str = ">=2,<3"
    probe: str = "probe_bulk_update"
    api: str = "CORE_API_VERSION"
    source: str = ""

    def install(self, site: Path) -> None:
        """Writes it into a folder that is on `sys.path`."""
        module = f"words_{self.distribution.replace('-', '_')}"
        info = site / f"{self.distribution.replace('-', '_')}-{self.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {self.version}\n"
        )
        (info / "entry_points.txt").write_text(
            f"[weightlane]\n{self.entry or self.distribution} = {module}\n"
        )
        source = self.source or PLUGIN.format(
            era=self.era, versions=self.versions, probe=self.probe, api=self.api
        )
        (site / f"{module}.py").write_text(source)


OURS = FakePlugin("acme-weightlane")
FORK = FakePlugin("fork-weightlane")


@dataclass(frozen=True, slots=True)
class Scene:
    """Made-up plugins, an engine's version and request fields, and what the user set."""

    plugins: tuple[FakePlugin, ...] = (OURS,)
    version: str = "2.4"
    request_fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: HAS_BULK)
    environ: Mapping[str, str] = field(default_factory=dict)
    engine: str = "acme"
    pin: str | None = None

    def words(self) -> str:
        """What a user reads: the choice with its evidence and notes, or the error; warnings before it."""
        facts = EngineFacts(
            engine=self.engine,
            version=self.version,
            source="server",
            request_fields=dict(self.request_fields),
        )
        with _installed(self.plugins) as site, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PluginWarning)
            try:
                registry = Registry(environ=self.environ, project=site).load()
                chosen = select(registry, "rollout", self.engine, facts, pin=self.pin)
            except WeightlaneError as error:
                said = [f"{type(error).__module__}.{type(error).__name__}:"]
                said += [part for part in (error.what, error.why, error.fix) if part]
            else:
                said = [f"{chosen.origin}: chosen", *(f"  {line}" for line in chosen.evidence)]
                said += [f"  note: {line}" for line in chosen.notes]
        return "\n".join([*(f"PluginWarning: {item.message}" for item in caught), *said]) + "\n"


SCENES: dict[str, Scene] = {
    "chosen": Scene(),
    "newer": Scene(version="3.0.dev2"),
    "probe-refuses": Scene(request_fields=LACKS_BULK),
    "assumed": Scene(version="0.0.1+git", environ={"WEIGHTLANE_ASSUME_ACME_VERSION": "2.4"}),
    "tie": Scene(plugins=(OURS, FORK)),
    "pinned": Scene(plugins=(OURS, FORK), pin="fork-weightlane==1.*"),
    "pin-unmet": Scene(plugins=(OURS, FORK), pin="fork-weightlane>=2"),
    "conflict": Scene(
        plugins=(FakePlugin("acme-weightlane", entry="acme"), FakePlugin("fork-weightlane", entry="acme"))
    ),
    "conflict-pinned": Scene(
        plugins=(FakePlugin("acme-weightlane", entry="acme"), FakePlugin("fork-weightlane", entry="acme")),
        environ={"WEIGHTLANE_PIN_ACME": "fork-weightlane"},
    ),
    "disabled": Scene(
        plugins=(FakePlugin("acme-weightlane", entry="acme"),),
        environ={"WEIGHTLANE_DISABLE_PLUGINS": "acme-weightlane"},
    ),
    "broken": Scene(plugins=(FakePlugin("acme-weightlane", entry="acme", source="import acme_internals\n"),)),
    "broken-rival": Scene(
        plugins=(OURS, FakePlugin("fork-weightlane", entry="acme", source="import acme_internals\n"))
    ),
    "incompatible": Scene(plugins=(FakePlugin("acme-weightlane", api="(99, 0)"),)),
    "strict": Scene(
        plugins=(OURS, FakePlugin("fork-weightlane", source="import acme_internals\n")),
        environ={"WEIGHTLANE_STRICT_PLUGINS": "1"},
    ),
    "unknown-engine": Scene(engine="acmee"),
}


@contextlib.contextmanager
def _installed(plugins: tuple[FakePlugin, ...]) -> Iterator[Path]:
    """Puts the plugins where entry points are looked for, and takes every trace of them away again."""
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for plugin in plugins:
            plugin.install(site)
        sys.path.insert(0, folder)
        writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            yield site
        finally:
            sys.dont_write_bytecode = writes_bytecode
            sys.path.remove(folder)
            sys.path_importer_cache.pop(folder, None)
            for name in set(sys.modules) - before:
                if name.startswith("words_"):
                    del sys.modules[name]


if __name__ == "__main__":
    for title, scene in SCENES.items():
        sys.stdout.write(f"-- {title}\n{scene.words()}\n")
