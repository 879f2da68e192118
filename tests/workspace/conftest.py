"""The workspace as its pyproject files describe it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Distribution:
    """One folder with a pyproject.toml."""

    folder: Path
    pyproject: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.pyproject["project"]["name"])

    @property
    def version(self) -> str:
        return str(self.pyproject["project"]["version"])

    @property
    def package(self) -> Path:
        return self.folder / "src" / self.name.replace("-", "_")


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def root_pyproject() -> dict[str, Any]:
    return read(ROOT / "pyproject.toml")


@pytest.fixture(scope="session")
def distributions() -> dict[str, Distribution]:
    paths = [ROOT / "core/pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    found = [Distribution(path.parent, read(path)) for path in paths]
    return {distribution.name: distribution for distribution in found}


@pytest.fixture(scope="session")
def core(distributions: dict[str, Distribution]) -> Distribution:
    return distributions["weightlane"]


@pytest.fixture(scope="session")
def plugins(distributions: dict[str, Distribution]) -> list[Distribution]:
    return [distribution for name, distribution in distributions.items() if name != "weightlane"]
