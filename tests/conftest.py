"""Options of the live tests, and plugins of all tests: pytest takes both from the outermost conftest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Makes `requirement_marks` importable. Not this folder itself: `import vllm` would find tests/vllm.
sys.path.insert(0, str(Path(__file__).parent / "requirements"))

pytest_plugins = ["requirement_marks", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightlane", "real engines")
    group.addoption("--vllm-python", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    group.addoption("--sglang-python", metavar="PYTHON", help="interpreter of an environment that has SGLang")
    group.addoption("--models-dir", metavar="DIR", help="where examples/smollm2.py wrote its folders")
