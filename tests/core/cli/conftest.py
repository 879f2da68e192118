"""The command line run in this process, over the fake distributions of the registry's tests."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.registry
from weightlane.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def _neighbour() -> ModuleType:
    """The conftest of tests/core/registry, which pytest shows to that folder alone."""
    path = Path(__file__).parents[1] / "registry/conftest.py"
    spec = importlib.util.spec_from_file_location("registry_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


site = _neighbour().site


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
