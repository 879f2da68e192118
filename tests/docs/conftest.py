"""The scripts and pages of the site. They lie in docs/, which is no package."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import weightlane.notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def docs() -> Path:
    return DOCS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of docs/ by name, for one test."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.setattr(weightlane.notices, "_shown", set())
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (DOCS / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(scope="session")
def block() -> Callable[[str, str], str]:
    """The text of the code block that a page calls by this name."""

    def find(page: str, name: str) -> str:
        text = (DOCS / page).read_text()
        found = re.search(rf"\.\. code-block:: \w+\n   :name: {name}\n\n((?:   .*\n|\n)+)", text)
        assert found is not None, f"{page} has no code block {name}"
        return textwrap.dedent(found[1]).strip() + "\n"

    return find
