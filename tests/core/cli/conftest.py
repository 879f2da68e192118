"""The command line run in this process, over the fake distributions of the registry's tests."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.registry
from weightlane.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


# Its conftest is shown by pytest to the folder tests/core/registry alone.
site = runpy.run_path(str(Path(__file__).parents[1] / "registry/conftest.py"), run_name="registry")["site"]


@dataclass(frozen=True)
class Run:
    """What one command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it has to be."""
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Runs the command line with a registry of its own."""

    def one(*words: str) -> Run:
        monkeypatch.setattr(weightlane.registry, "_process_registry", None)
        capsys.readouterr()
        status = main(words)
        return Run(status, *capsys.readouterr())

    return one
